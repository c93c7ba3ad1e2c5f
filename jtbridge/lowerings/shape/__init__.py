"""Views, copies, padding and tensors made from sizes."""
