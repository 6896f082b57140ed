"""The meter: what cards say is added up, what cannot be read is left out."""

from specbuild.serve.cost.energy import Energy


class Nvml:
    """A library of two cards, of which one has no meter."""

    def __init__(self, status=0):
        self.status, self.millijoules = status, 5000

    def nvmlInit_v2(self):  # noqa: N802
        return self.status

    def nvmlDeviceGetCount_v2(self, count):  # noqa: N802
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):  # noqa: N802
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device, found):  # noqa: N802
        found._obj.value = self.millijoules
        return 0 if device.value == 1 else 3


def test_cards_say_what_they_took():
    nvml = Nvml()
    energy = Energy(lambda name: nvml)
    nvml.millijoules += 2500
    assert energy.joules() == 2.5
    assert Energy(lambda name: Nvml(status=9)).joules() is None
    assert Energy(lambda name: object()).joules() is None


def test_without_the_library_there_is_no_meter():
    def absent(_):
        raise OSError("no such library")

    assert Energy(absent).joules() is None
