"""`python -m muster.probe HOST:PORT [SERVICE]`: does a gRPC server say SERVING?

For health checks of containers: exit status 0 for SERVING, else 1 and a line that says why. Imports
no more than it needs: it runs every few seconds. Does not cover: who else there is (`muster
doctor`).
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

WITHIN_S = 3.0


def probe(address: str, service: str = "", *, within_s: float = WITHIN_S) -> str:
    """Why it does not serve, "" when it does. service: "" asks for the whole process."""
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=within_s)
        except grpc.RpcError as error:
            # The class that is raised is also a call, which has these.
            return f"{error.code().name}: {error.details()}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2:
        print("usage: python -m muster.probe HOST:PORT [SERVICE]", file=sys.stderr)  # noqa: T201
        return 2
    if problem := probe(*arguments):
        print(f"{' '.join(arguments)}: {problem}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
