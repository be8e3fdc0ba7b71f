"""The suite of transports on memory of real devices, between two processes."""

from kvferry.testing.transport_suite import TransportSuite


class TestOneDevice(TransportSuite):
    factory = "kvferry.transport.nixl:NixlTransport"
    memory = "kvferry.testing.transport_memory:CudaMemory"


class TestSecondDevice(TransportSuite):
    factory = "kvferry.transport.nixl:NixlTransport"
    memory = "kvferry.testing.transport_memory:SecondCudaMemory"


class TestMooncake(TransportSuite):
    factory = "kvferry.transport.mooncake:MooncakeTransport"
    memory = "kvferry.testing.transport_memory:CudaMemory"
