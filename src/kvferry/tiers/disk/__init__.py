"""The parts of the disk tier: records on disk, segment files, the room in them, and the threads that move bytes."""
