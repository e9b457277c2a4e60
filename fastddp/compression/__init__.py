"""Exchanges that send less than the gradients: 8 bits and PowerSGD, with what they remember."""
