// Preloaded: what torch's CPU build is to answer when asked which accelerator there is.
#include <c10/core/DeviceType.h>
#include <dlfcn.h>

#include <optional>

static bool is_cuda = false;
static void* cuda_hooks = nullptr;

namespace at {
struct CUDAHooksInterface;

namespace accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) {
  if (is_cuda) return c10::DeviceType::CUDA;
  return std::nullopt;
}

bool isAccelerator(c10::DeviceType type) { return is_cuda && type == c10::DeviceType::CUDA; }
}  // namespace accelerator

namespace detail {
const CUDAHooksInterface& getCUDAHooks() {
  if (cuda_hooks) return *static_cast<const CUDAHooksInterface*>(cuda_hooks);
  using Getter = const CUDAHooksInterface& (*)();
  const char* name = "_ZN2at6detail12getCUDAHooksEv";
  static auto own = reinterpret_cast<Getter>(dlsym(RTLD_NEXT, name));
  if (!own) {
    void* library = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);
    own = reinterpret_cast<Getter>(dlsym(library, name));
  }
  return own();
}
}  // namespace detail
}  // namespace at

extern "C" void zero_set_accelerator(void* hooks) {
  cuda_hooks = hooks;
  is_cuda = true;
}
