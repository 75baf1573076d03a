"""7. Pure functions of predictions; log-probabilities come as [n, classes], labels as [n]."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

LogProbs = Float[Tensor, "n classes"]
Labels = Int[Tensor, " n"]


def accuracy(log_probs: LogProbs, labels: Labels) -> float:
    """Share of the examples whose most probable class is right."""
    return float(multiclass_accuracy(log_probs, labels, num_classes=log_probs.shape[1], average="micro"))


def cross_entropy(log_probs: LogProbs, labels: Labels) -> float:
    """Mean -log p(label), in nats."""
    return float(torch.nn.functional.nll_loss(log_probs, labels))


def calibration_error(log_probs: LogProbs, labels: Labels, bins: int = 15) -> float:
    """Expected calibration error: mean distance of confidence and accuracy over equal bins of confidence."""
    probabilities = log_probs.exp().clamp(0, 1)
    return float(multiclass_calibration_error(probabilities, labels, num_classes=log_probs.shape[1], n_bins=bins))


def combine(log_probs: Float[Tensor, "k n classes"]) -> LogProbs:
    """The normalised mean of k log-probabilities: a product of beliefs, each to the power 1/k."""
    return log_probs.mean(0).log_softmax(1)


def mixture(log_probs: Float[Tensor, "k n classes"]) -> LogProbs:
    """The logarithm of the mean of k probabilities: an expectation, over starts of the walk."""
    return log_probs.logsumexp(0) - torch.log(torch.tensor(float(len(log_probs))))
