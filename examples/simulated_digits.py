"""A model to simulate: `pyps simulate` and `pyps advise` take a script of this form (docs/simulate.md)."""

import torch
from sklearn.datasets import load_digits

images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
images = images.float() / 16
order = torch.randperm(len(images))
held_out, trained = order[:360], order[360:]

data = images[trained], labels[trained]


def model():
    return torch.nn.Sequential(
        *(torch.nn.Linear(64, 512), torch.nn.ReLU()),
        *(torch.nn.Linear(512, 512), torch.nn.ReLU()),
        torch.nn.Linear(512, 10),
    )


def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def evaluate(model):
    """Return the share of the held-out images that are taken for another digit."""
    wrong = model(images[held_out]).argmax(1) != labels[held_out]
    return wrong.float().mean().item()
