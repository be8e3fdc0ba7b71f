"""The suite of transports on memory of real devices, between two processes, and the guard word's second look there."""

from kvferry.testing.transport_suite import TransportSuite

from ..local.second_look import SecondLook


class TestOneDevice(TransportSuite, SecondLook):
    factory = "kvferry.transport.nixl:NixlTransport"
    memory = "kvferry.testing.transport_memory:CudaMemory"


class TestSecondDevice(TransportSuite, SecondLook):
    factory = "kvferry.transport.nixl:NixlTransport"
    memory = "kvferry.testing.transport_memory:SecondCudaMemory"


class TestMooncake(TransportSuite, SecondLook):
    factory = "kvferry.transport.mooncake:MooncakeTransport"
    memory = "kvferry.testing.transport_memory:CudaMemory"
