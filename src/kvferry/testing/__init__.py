"""What tests of layouts, plans, transports and tiers need. Shipped, and imported by nothing else in the package."""
