"""How a policy learns from its own samples: losses, weight sets, the loop of one epoch."""
