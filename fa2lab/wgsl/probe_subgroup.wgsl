// Measures how many invocations share a subgroup. A reported range is no promise, so layouts ask this kernel.
//
// A workgroup owns the probe; every invocation stores the same number. Dispatch: 1 workgroup.
// Constants: none. Source: WGSL specification, built-in value subgroup_size.

@group(0) @binding(0) var<storage, read_write> size: array<u32>;

@compute @workgroup_size(64)
fn probe_subgroup(@builtin(subgroup_size) subgroup_size: u32, @builtin(local_invocation_index) lane: u32) {
  if (lane == 0u) {
    size[0] = subgroup_size;
  }
}
