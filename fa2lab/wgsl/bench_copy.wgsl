// The ceiling of memory: a copy, as fast as the device reads and writes.
//
//   copied_i = original_i
//
// An invocation owns VECS vec4s, a whole grid of invocations apart, so that neighbours always touch neighbours.
// Dispatch: x = N / VECS / INVOCATIONS, where N vec4s stand in each buffer.
//
// Constants: INVOCATIONS, VECS. Snippets: none.
// Source: the stream benchmark's copy, McCalpin, "Memory bandwidth and machine balance", 1995.

@group(0) @binding(0) var<storage, read> original: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> copied: array<vec4<f32>>;

@compute @workgroup_size(INVOCATIONS)
fn bench_copy(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>) {
  for (var n = 0u; n < VECS; n++) { // unroll
    let at = n * grid.x * INVOCATIONS + id.x;
    copied[at] = original[at];
  }
}
