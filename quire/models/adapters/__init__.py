"""LoRA adapters for loaded models: which weights an adapter can change (`places`), and reading its tensors (`load`)."""
