"""TorchTitan's trainer on this device: recipes for dense and mixture-of-experts models."""
