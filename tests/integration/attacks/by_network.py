"""Ways to the host and to other machines."""

from __future__ import annotations

from tests.integration.attacks.attempt import Attack

_GREETED = "assert s.recv(9) == b'hello\\n'"

ATTACKS = [
    Attack(
        "connect to a server of the host",
        ("network",),
        f's = socket.create_connection(("127.0.0.1", @PORT@), 5); {_GREETED}',
    ),
    Attack(
        "ask the cloud's metadata server",
        ("network",),
        f's = socket.create_connection(("169.254.169.254", 80), 5); {_GREETED}',
    ),
    Attack(
        "connect to an abstract socket of the host",
        ("network",),
        f's = socket.socket(socket.AF_UNIX); s.connect("\\0@TOKEN@"); {_GREETED}',
    ),
    Attack(
        "a raw socket",
        ("caps",),
        "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)",
    ),
    Attack(
        "a packet socket", ("caps", "filter"), "socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)"
    ),
    Attack(
        "reach past the network namespace by vsock",
        ("filter",),
        "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)",
    ),
    Attack(
        "the kernel's ciphers by a socket",
        ("filter",),
        "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
    ),
    Attack(
        "give the box an address",
        ("caps",),
        """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
address = struct.pack("16sHH4s8x", b"lo", socket.AF_INET, 0, bytes((10, 9, 8, 7)))
fcntl.ioctl(s, 0x8916, address)
""",
    ),
    Attack(
        "make a network device",
        ("caps",),
        """
s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
s.bind((0, 0))
kind = struct.pack("HH", 9, 1) + b"veth\\0\\0\\0\\0"
info = struct.pack("HH", 4 + len(kind) + 0, 18) + kind
body = struct.pack("BxHiII", 0, 0, 0, 0, 0) + info
s.send(struct.pack("IHHII", 16 + len(body), 16, 0x605, 1, 0) + body)
assert struct.unpack_from("i", s.recv(4096), 16)[0] == 0
""",
    ),
]
