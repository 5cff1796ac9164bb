"""Engines that measure generated frames: embedded ones here, heavy ones as worker processes."""
