"""How a model is placed on devices. One process on one device for now."""
