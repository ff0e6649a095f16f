import torch
from sklearn.datasets import load_digits

from pyps_client import RemoteOptimizer
from pyps_client.data import worker_sampler

dataset = torch.utils.data.TensorDataset(*map(torch.tensor, load_digits(return_X_y=True)))
loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=worker_sampler(dataset), drop_last=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = RemoteOptimizer(model, torch.optim.Adagrad(model.parameters(), lr=0.05))
for epoch in range(20):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x.float() / 16), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}, update {optimizer.global_step}: loss {loss.item():.3f}")
