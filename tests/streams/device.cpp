// One CUDA device for torch's CPU build: a current stream for each thread, and callbacks where C++
// (autograd, above all) records an event or makes a stream wait for one.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

using Callback = void (*)(int64_t event, int64_t stream);

static const Device device(DeviceType::CUDA, 0);
static thread_local int64_t current_stream = 0;
static int64_t last_event = 0;
static Callback on_record = nullptr;
static Callback on_block = nullptr;

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return device; }
  Device getDevice() const override { return device; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const noexcept override {
    return Stream(Stream::UNSAFE, device, current_stream);
  }
  Stream getDefaultStream(Device) const override { return Stream(Stream::UNSAFE, device, 0); }
  Stream exchangeStream(Stream stream) const noexcept override {
    Stream before = getStream(device);
    current_stream = stream.id();
    return before;
  }
  void record(void** event, const Stream& stream, DeviceIndex, EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(++last_event);
    if (on_record) on_record(reinterpret_cast<int64_t>(*event), stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (on_block && event) on_block(reinterpret_cast<int64_t>(event), stream.id());
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
};

struct Hooks final : at::CUDAHooksInterface {
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool hasCUDA() const override { return false; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void init() const override {}
};

static Guard guard;
static Hooks hooks;

extern "C" {
void* zero_install(Callback record, Callback block) {
  on_record = record;
  on_block = block;
  impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
  return static_cast<at::CUDAHooksInterface*>(&hooks);
}
int64_t zero_current_stream() { return current_stream; }
void zero_set_stream(int64_t stream) { current_stream = stream; }
}
