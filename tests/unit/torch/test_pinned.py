import mmap

import numpy as np
import pytest
import torch

from pyps_client.torch.memory import PinnedPages

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PAGE = mmap.PAGESIZE


def test_memory_is_pinned_until_it_is_released():
    memory = np.frombuffer(mmap.mmap(-1, 16 * PAGE), np.float32)
    pages = PinnedPages([memory[:100], memory[3 * PAGE // 4 :]], [torch.device("cuda:0")])
    on_host = torch.from_numpy(memory)
    assert on_host.is_pinned()
    on_device = torch.arange(len(memory), dtype=torch.float32, device="cuda")
    on_host.copy_(on_device, non_blocking=True)
    pages.release()
    assert memory.tolist() == list(range(len(memory)))
    assert not torch.from_numpy(memory).is_pinned()


def test_memory_that_cannot_be_pinned_is_logged_and_leaves_no_cuda_error(caplog):
    caplog.set_level("INFO")
    memory = np.frombuffer(mmap.mmap(-1, PAGE), np.float32)
    first = PinnedPages([memory], [torch.device("cuda:0")])
    again = PinnedPages([memory], [torch.device("cuda:0")])
    assert "cannot be pinned" in caplog.text
    assert torch.ones(4, device="cuda").sum().item() == 4
    again.release()
    first.release()
