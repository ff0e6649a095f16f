"""One process of a group, as tests start it: `python replica_process.py SCENARIO RANK COUNT STORE [ARGUMENT ...]`.

It prints what it saw as JSON, in its last line.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from pyps_client import Launch, Session, lease, leave
from pyps_client.replica.arrangement import arrange
from pyps_client.replica.dtensor import claims_of
from pyps_client.replica.processes import Block, Replica, translated
from pyps_wire.errors import InvalidArgument, PypsError, ReplicaLost
from pyps_wire.partition import block_index
from replicas import CUT, SGD, vectors_of, whole_tensors

SHARD_SIZE = 1024


class Network(torch.nn.Module):
    """A plain LayerNorm, a pair of layers for Colwise and Rowwise, a LayerNorm over a cut sequence, a layer apart."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(6)
        self.up = torch.nn.Linear(6, 8)
        self.down = torch.nn.Linear(8, 6)
        self.last = torch.nn.LayerNorm(6)
        self.uneven = torch.nn.Linear(6, 5)

    def forward(self, inputs):
        return self.last(self.down(torch.relu(self.up(self.norm(inputs)))))


def described(claim):
    return [claim.name, claim.shape, claim.offset, claim.whole_shape, sorted(claim.holders)]


def words(replica):
    """What is said, by each of the ways to say something."""
    return {
        "name": replica.name,
        "told": replica.broadcast({"index": replica.index}),
        "gathered": replica.all_gather(f"process {replica.index}"),
        # Lost in float32.
        "total": replica.all_reduce([1.0, 2.0**-40 if replica.index else 1.0]),
    }


def cut(replica):
    """Claims, parts, gradients and copies of a module that parallelize_module cut, beside the module as a whole."""
    torch.manual_seed(1)
    whole, network = Network(), Network()
    network.load_state_dict(whole.state_dict())
    for norm in (whole.norm, whole.last, network.norm, network.last):
        torch.nn.init.uniform_(norm.weight, generator=torch.Generator().manual_seed(2))
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "last": SequenceParallel(),
        "uneven": ColwiseParallel(),
    }
    parallelize_module(network, init_device_mesh("cpu", (2,)), plan)
    inputs = torch.randn(3, 4, 6)
    whole(inputs).pow(3).sum().backward()
    network(inputs).full_tensor().pow(3).sum().backward()
    claimed = claims_of([list(network.named_parameters())], replica)
    arrangement = arrange(replica.all_gather(claimed.claims), replica.index, shard_size=SHARD_SIZE)
    differences = {}
    parameters = dict(whole.named_parameters())
    for claim, gradient in zip(claimed.claims, claimed.gradients(), strict=True):
        expected = parameters[claim.name].grad
        if expected is None:
            assert gradient is None
            continue
        assert type(gradient) is torch.Tensor
        block = expected[block_index(claim.offset, claim.shape)]
        differences[claim.name] = float((gradient - block).norm() / block.norm())
    return {
        "claims": [described(claim) for claim in claimed.claims],
        "held": [held.tensor.name for held in arrangement.held],
        "differences": differences,
        "wrong": filled(replica, arrangement, claimed),
    }


def filled(replica, arrangement, claimed):
    """Tensors that are not the model's after each process got its own and copies were handed round."""
    for claim, local in zip(claimed.claims, claimed.local, strict=True):
        with torch.no_grad():
            local.fill_(-1.0)
        assert local.shape == claim.shape
    for tensor, position, where in arrangement.held:
        numbers = values(tensor.name, tensor.whole_shape or tensor.shape)
        claimed.local[position].detach()[where] = numbers[
            block_index(tensor.offset or (0,) * numbers.ndim, tensor.shape)
        ]
    replica.spread(arrangement.copies, claimed.local)
    return [
        claim.name
        for claim, local in zip(claimed.claims, claimed.local, strict=True)
        if not torch.equal(local, values(claim.name, claim.whole_shape)[block_index(claim.offset, claim.shape)])
    ]


def values(name, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode())))


def plain(replica):
    """Parameters without DTensors: a block, copies, and what is a process's own."""
    rows = (3, 2)[replica.index]
    mine = Replica(blocks={"patch": Block((3 * replica.index, 0), (5, 2))}, replicated=["shared"])
    named = [("patch", torch.zeros(rows, 2)), (f"stage{replica.index}", torch.zeros(3)), ("shared", torch.zeros(()))]
    claimed = claims_of([named[:1], named[1:]], mine)
    arrangement = arrange(mine.all_gather(claimed.claims), mine.index, shard_size=SHARD_SIZE)
    return {
        "claims": [described(claim) for claim in claimed.claims],
        "param_groups": [claim.param_group for claim in claimed.claims],
        "wrong": filled(mine, arrangement, claimed),
    }


def refusals(replica):
    """What each process is told where one or all of them claim what is no model."""
    first = replica.index == 0
    mesh = init_device_mesh("cpu", (2,))
    partial = torch.nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Partial()]))
    thin = torch.nn.ModuleDict({"thin": torch.nn.Linear(4, 1)})
    parallelize_module(thin, mesh, {"thin": ColwiseParallel()})
    own = (f"own{replica.index}", torch.zeros(4))
    cases = {
        "partial": (replica, [("partial", partial)]),
        "one extent": (replica, [("0.weight", torch.zeros(2))]),
        "a part is missing": (
            Replica(blocks={"w": Block((0,), (4,))} if first else {}),
            [("w", torch.zeros(2)) if first else own],
        ),
        "beyond the whole": (Replica(blocks={"w": Block((2 * replica.index,), (3,))}), [("w", torch.zeros(2))]),
        "no such block": (Replica(blocks={} if first else {"v": Block((0,), (1,))}), [own]),
        "no such copy": (Replica(replicated=["v"] if first else []), [own]),
        "a DTensor's block": (Replica(blocks={"thin.weight": Block((0, 0), (1, 4))}), list(thin.named_parameters())),
    }
    return {what: refusal(*case) for what, case in cases.items()}


def refusal(replica, named):
    try:
        claims = replica.all_gather(claims_of([named], replica).claims)
        arrange(claims, replica.index, shard_size=SHARD_SIZE)
    except PypsError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def errors(replica):
    """What errors of a program with a replica are taken for."""
    lost = RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:1\nand more")
    wrapped = ValueError("a step failed")
    wrapped.__cause__ = lost
    kinds = {
        "of torch": lost,
        "wrapped": wrapped,
        "the user's": RuntimeError("shapes differ"),
        "ours": InvalidArgument("no"),
    }
    return {what: str(translated(error)) for what, error in kinds.items()}


def ended(replica):
    named = [(f"own{replica.index}", torch.zeros(2)), ("shared", torch.zeros(3))]
    alike = Replica(replicated=["shared"])
    claimed = claims_of([named], alike)
    arrangement = arrange(alike.all_gather(claimed.claims), alike.index, shard_size=SHARD_SIZE)
    dist.destroy_process_group()
    return {**words(alike), "wrong": filled(alike, arrangement, claimed)}


def meshes(everybody):
    """Four processes: replicas of two in one world, and tensors on a mesh of two dimensions."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    pair = Replica(mesh["inner"])
    placements = {"rows": [Replicate(), Shard(0)], "tiles": [Shard(0), Shard(1)], "stripes": [Shard(0), Shard(0)]}
    named = [
        (name, torch.nn.Parameter(distribute_tensor(torch.zeros(8, 6), mesh, of_tensor)))
        for name, of_tensor in placements.items()
    ]
    claimed = claims_of([named], everybody)
    arrangement = arrange(everybody.all_gather(claimed.claims), everybody.index, shard_size=SHARD_SIZE)
    return {
        "pair": [pair.index, pair.count, pair.all_gather(dist.get_rank())],
        "claims": [described(claim) for claim in claimed.claims],
        "wrong": filled(everybody, arrangement, claimed),
        "outside": refusal(pair, named),
    }


def lost(replica):
    """What a process says that outlives another, in pyps's collective and in its own."""
    leave._hook_exceptions()
    print("met", replica.all_gather(replica.index), flush=True)
    if replica.index == 1:
        signal.pause()
    try:
        replica.all_gather(0)
    except ReplicaLost as error:
        print(f"ReplicaLost: {error}", flush=True)
    dist.all_reduce(torch.zeros(2))


def founding(replica, servers, stops_where):
    """Joins a run with one of two parts; the second process stops itself there, and the first waits for it."""
    lease.GRACE_SECONDS = leave.GRACE_SECONDS = 0.5

    def stop(where):
        if replica.index == 1 and stops_where == where:
            print("stops", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)

    def initial():
        print("elected", flush=True)
        stop("founding")
        return [vectors_of(whole_tensors())[replica.index]]

    launch = Launch(servers=tuple(servers.split(",")), worker_id=replica.name)
    Session(CUT, SGD, launch=launch, initial=initial, parts=[replica.index], peers=replica).connect()
    print("joined", flush=True)
    stop("joined")
    replica.all_gather("here")


def transformer(replica, how):
    """The losses of the example's transformer, cut so or not, under torch's own optimizer."""
    import model_parallel

    model, backpropagate = model_parallel.cut(model_parallel.Transformer(), how)
    texts = model_parallel.minibatches(model_parallel.standard_library()[0], seed=1)
    return train(model, lambda: backpropagate(next(texts)).item())


def patches(replica):
    """The losses of the example's locally connected network, over as many bands as there are processes."""
    import halo
    import patches

    band = halo.Band(patches.SIDE, index=replica.index if replica else 0, count=replica.count if replica else 1)
    model = patches.Network(band)
    images, labels = patches.digits()[0].tensors

    def backpropagate():
        band.log.clear()
        loss = torch.nn.functional.cross_entropy(model(images[:64]), labels[:64])
        loss.backward()
        assert not band.log.times or max(band.log.times.values()) == 1, "a node's state crossed twice"
        return loss.item()

    return train(model, backpropagate)


def train(model, backpropagate, steps=6):
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.02)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(backpropagate())
        optimizer.step()
    return losses


SCENARIOS = {
    "two": (words, cut, plain, refusals, errors, ended),
    "four": (meshes,),
    "lost": (lost,),
    "founding": (founding,),
    "transformer": (transformer,),
    "patches": (patches,),
}


def main():
    scenario, rank, count, store, *arguments = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    replica = None
    if int(count) > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(count))
        replica = Replica()
        replica.name = "replica-0"
    # However a model is cut, it begins with the same parameters.
    torch.manual_seed(1)
    print(json.dumps({run.__name__: run(replica, *arguments) for run in SCENARIOS[scenario]}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
