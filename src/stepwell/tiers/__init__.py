"""Levels of storage below the device, all behind one protocol: `tier`."""
