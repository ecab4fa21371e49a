"""The operators of the model: one file per operator, its implementations side by side, chosen once by the registry."""
