"""Groups of ranks: how processes that compute one model together exchange tensors. Knows neither layers nor models."""

from quire.parallel.communicator import ALONE, Alone, Communicator, RankTimeout

__all__ = ["ALONE", "Alone", "Communicator", "RankTimeout"]
