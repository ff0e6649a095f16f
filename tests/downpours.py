"""A worker of Downpour on a session that records, for unit tests of its schedule."""

import numpy as np
import torch

from pyps_client.torch.downpour import Downpour
from pyps_client.torch.layout import plan
from pyps_client.torch.pace import Pace
from recording_session import RecordingSession

SIZE = 4


def downpour(
    *, rate: float = 0.0, local: float = 0.0, codec: str = "float32", session_has=None, read_my_writes=False, **pace
) -> tuple[Downpour, RecordingSession, torch.nn.Parameter]:
    """A worker of a model of one tensor of zeros, its parameters already pulled."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(SIZE, 1, bias=False)
    session = RecordingSession([np.zeros(SIZE, np.float32)], rate=rate, codec=codec)
    for name, value in (session_has or {}).items():
        setattr(session, name, value)
    layout = plan(model, [{"params": list(model.parameters())}])
    worker = Downpour(
        session,
        layout,
        pace=Pace(**pace),
        local_rates=lambda: [local],
        read_my_writes=read_my_writes,
    )
    worker.start()
    return worker, session, model.weight


def gradient(value: float) -> list[torch.Tensor]:
    return [torch.full((1, SIZE), value)]


def payloads(session: RecordingSession) -> list[float]:
    return [float(pushed.vectors[0][0]) for pushed in session.pushes]
