"""What every draft source would have done along recorded answers, so that policies can be tried without generating."""

from autospec.scores.scored import DraftScores, OfferScores, ScoredRequest

__all__ = ["DraftScores", "OfferScores", "ScoredRequest"]
