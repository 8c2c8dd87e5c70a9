"""Prices of the shop."""


def reduce(price: float, percent: float) -> float:
    """Return the price after a discount."""
    return round(price * percent / 100, 2)
