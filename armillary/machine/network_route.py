"""The network interface through which this machine reaches another, for gloo, NCCL and torchrun.

torch's own choice is the address that the host name resolves to, which is often a loopback address or none at all.
"""

import ipaddress
import socket
from dataclasses import dataclass

import psutil

from armillary.errors import BadInput, NotFound

_ELSEWHERE = "192.0.2.1"
"""an address of documentation (RFC 5737): nothing is sent there, only the default route is looked up"""


@dataclass(frozen=True, kw_only=True)
class Route:
    """An interface of this machine and its address."""

    interface: str
    address: str

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def route_to(host: str, *, interface: str = "", is_host: bool = False) -> Route:
    """The route to `host`, or that of a named interface. The machine that others meet on (`is_host`) is reached at its
    own address; a name that only resolves to loopback there (as /etc/hosts often has it) gives way to the default
    route."""
    if interface:
        return Route(interface=interface, address=_address_of(interface))
    target = _resolve(host)
    if is_host and target in (own := _addresses()):
        route = Route(interface=own[target], address=target)
    else:
        route = _towards(target)
    by_name = host not in ("localhost", target)
    return _default_route(route) if is_host and by_name and route.is_loopback else route


def _resolve(host: str) -> str:
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise NotFound(
            f"the name {host} has no address here ({error.strerror}); name the host by its address"
        ) from None
    return str(infos[0][4][0])


def _towards(target: str) -> Route:
    """The source address that the kernel would use; a UDP socket that connects sends nothing."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError as error:
            raise NotFound(f"no route to {target} ({error.strerror}); try --set launch.interface=NAME") from None
        source = str(probe.getsockname()[0])
    return Route(interface=_addresses().get(source, ""), address=source)


def _default_route(fallback: Route) -> Route:
    try:
        return _towards(_ELSEWHERE)
    except NotFound:
        return fallback


def _addresses() -> dict[str, str]:
    """Address -> interface, of this machine."""
    internet = (socket.AF_INET, socket.AF_INET6)
    return {
        each.address.partition("%")[0]: name
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family in internet
    }


def _address_of(interface: str) -> str:
    addresses = psutil.net_if_addrs()
    if interface not in addresses:
        names = ", ".join(sorted(addresses))
        raise BadInput(f"there is no network interface {interface} here; it has {names}")
    by_family = {each.family: each.address.partition("%")[0] for each in reversed(addresses[interface])}
    address = by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6)
    if address is None:
        raise BadInput(f"the network interface {interface} has no address; try another, or leave launch.interface out")
    return str(address)
