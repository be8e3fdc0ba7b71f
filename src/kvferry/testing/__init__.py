"""Test suites, oracles and drawn cases. Shipped, and imported by no other folder of the package."""
