"""Each worker's part of the data: samplers of a fixed part, and portions that all workers of a run share."""

from pyps_client.data.portions import Portions
from pyps_client.data.samplers import GrowingBatchSampler, WorkerSampler, growing_batches, worker_sampler

__all__ = ["GrowingBatchSampler", "Portions", "WorkerSampler", "growing_batches", "worker_sampler"]
