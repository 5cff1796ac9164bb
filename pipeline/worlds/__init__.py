"""World models behind one protocol: the mini world and WorldPlay-5B are the same class, the 8B a second one."""
