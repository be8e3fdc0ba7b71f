"""The suite of transports on memory of real devices, between two processes."""

from ..support.transport_suite import TransportSuite


class TestOneDevice(TransportSuite):
    factory = "kvferry.transport.nixl:NixlTransport"
    memory = "tests.support.transport_memory:CudaMemory"


class TestSecondDevice(TransportSuite):
    factory = "kvferry.transport.nixl:NixlTransport"
    memory = "tests.support.transport_memory:SecondCudaMemory"


class TestMooncake(TransportSuite):
    factory = "kvferry.transport.mooncake:MooncakeTransport"
    memory = "tests.support.transport_memory:CudaMemory"
