"""A Ray cluster in a network namespace, whose nodes come and go by lines of input: add NAME RESOURCE, kill NAME."""

import os
import subprocess
import sys

from ray.cluster_utils import Cluster

# Without a route Ray asks for the machine's address by its name, for seconds. Nothing leaves the namespace.
for command in (
    "link set lo up",
    *(f"addr add 10.77.0.{n}/24 dev lo" for n in range(1, 20)),
    "route add default dev lo",
):
    subprocess.run(["ip", *command.split()], check=True)
# A node whose process is gone is dead after two seconds, not half a minute. One that answers late is just busy.
quick = {"health_check_period_ms": 500, "health_check_timeout_ms": 10_000, "health_check_failure_threshold": 4}
head = {"num_cpus": 0, "node_ip_address": "10.77.0.1", "include_dashboard": False, "_system_config": quick}
cluster = Cluster(initialize_head=True, head_node_args=head)
print(cluster.address, os.getpid(), flush=True)
nodes = {}
for number, line in enumerate(sys.stdin, start=2):
    what, name, *resources = line.split()
    if what == "add":
        own = dict.fromkeys(resources, 4)
        nodes[name] = cluster.add_node(num_cpus=4, node_ip_address=f"10.77.0.{number}", resources=own)
    else:
        cluster.remove_node(nodes.pop(name), allow_graceful=False)
    print(line, end="", flush=True)
cluster.shutdown()
