// Measures how many neighbouring invocations share a subgroup. A reported range is no promise, so layouts ask this
// kernel.
//
//   size = subgroup_size     if every invocation's place in its subgroup is its place in the workgroup, mod that size
//
// A workgroup owns the probe; its invocations agree on whether neighbours are neighbours. Dispatch: 1 workgroup.
// Constants: none. Source: WGSL specification, built-in values subgroup_size and subgroup_invocation_id.

@group(0) @binding(0) var<storage, read_write> size: array<u32>;

var<workgroup> in_order: array<u32, 256>;

@compute @workgroup_size(256)
fn probe_subgroup(
  @builtin(subgroup_size) subgroup_size: u32,
  @builtin(subgroup_invocation_id) place: u32,
  @builtin(local_invocation_index) lane: u32,
) {
  in_order[lane] = select(0u, 1u, place == lane % subgroup_size);
  workgroupBarrier(); // publishes every invocation's answer
  if (lane == 0u) {
    var all_in_order = 1u;
    for (var i = 0u; i < 256u; i++) {
      all_in_order = min(all_in_order, in_order[i]);
    }
    size[0] = select(1u, subgroup_size, all_in_order == 1u);
  }
}
