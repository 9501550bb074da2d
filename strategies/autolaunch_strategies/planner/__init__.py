"""How a model is best trained on many devices, found out without one: what each way costs, and which to choose."""
