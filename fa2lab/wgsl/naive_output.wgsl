// Naive attention, third of three dispatches: the weighted sum of the values.
//
//   O = P V
//
// An invocation owns one number of O: one (batch, head, row, d). It skips masked keys by position, since 0 · NaN
// would let what an unseen row of V holds through.
// Dispatch: x = ceil(D / LANES), y = Tq, z = B·H.
//
// Constants: LANES, HEAD_DIM. Snippets: problem.wgsl.
// Source: Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, equation 1.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> v: array<f32>;         // [B, Tk, Hkv, D]
@group(0) @binding(2) var<storage, read> attn: array<f32>;      // [B, H, Tq, Tk]
@group(0) @binding(3) var<storage, read_write> out: array<f32>; // [B, Tq, H, D]

@compute @workgroup_size(LANES)
fn naive_output(@builtin(global_invocation_id) global: vec3<u32>) {
  let id = offset_invocation(global, LANES);
  let d = id.x;
  let row = id.y;
  let bh = id.z;
  if (d >= HEAD_DIM) {
    return;
  }
  let start = (bh * params.n_q + row) * params.n_k;
  var o = 0.0;
  for (var key = 0u; key < keys_seen(row); key++) {
    o += attn[start + key] * v[kv_start(bh, key) + d];
  }
  out[q_start(bh, row) + d] = o;
}
