"""Shader modules without the checks that compilers insert: for the project's own kernels, never for edited text."""

from __future__ import annotations

from importlib import import_module

NO_CHECKS = 0  # WGPUShaderRuntimeChecks_None of wgpu.h


def trusted_module(wgpu, device, code: str, label: str):
    """A shader module of the wgpu device `device` without bounds checks and loop bounding, None where there is no such.

    WebGPU promises that no shader reads past a buffer and that every loop ends, so naga clamps every index and counts
    every loop's turns. That costs kernels over private arrays most of their time. wgpu-native's
    `wgpuDeviceCreateShaderModuleTrusted` leaves it out, module by module; wgpu-py loads the function and does not wrap
    it, so this builds the descriptor that wgpu-py's own `create_shader_module` builds. Written for wgpu-py 0.32.

    Dawn has a toggle, `disable_robustness`, for a whole device and so for edited text as well: it is left alone, and
    Tint's modules always have their checks.

    Raises what `create_shader_module` raises of a text that does not compile. Anything else that is not as expected
    gives None, and the caller takes the plain way.
    """
    try:
        native = import_module(f"{wgpu.__name__}.backends.wgpu_native._api")
        ffi, lib, text = native.ffi, native.lib, native.to_c_string_view
        wgsl = native.new_struct_p("WGPUShaderSourceWGSL *", code=text(code))
        wgsl[0].chain.next = ffi.NULL
        wgsl[0].chain.sType = lib.WGPUSType_ShaderSourceWGSL
        chain = ffi.cast("WGPUChainedStruct *", wgsl)
        descriptor = native.new_struct_p("WGPUShaderModuleDescriptor *", nextInChain=chain, label=text(label))
        made = native.libf.wgpuDeviceCreateShaderModuleTrusted(device._internal, descriptor, NO_CHECKS)
        return None if made == ffi.NULL else native.GPUShaderModule(label, made, device)
    except wgpu.GPUError:
        raise
    except Exception:  # the insides of another wgpu-py: whatever they raise, there is a plain way
        return None
