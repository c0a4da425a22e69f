// Naive attention, first of three dispatches: the scores, all of them.
//
//   S = scale · Q Kᵀ
//
// An invocation owns one score: one (batch, head, row, key). Nothing is shared, so every row reads all of K again.
// A masked pair is left alone: masking is a fact about its position, which the next two dispatches know as well.
// Dispatch: x = ceil(Tk / LANES), y = Tq, z = B·H.
//
// Constants: LANES, HEAD_DIM. Snippets: problem.wgsl.
// Source: Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, equation 1.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> q: array<f32>;          // [B, Tq, H, D]
@group(0) @binding(2) var<storage, read> k: array<f32>;          // [B, Tk, Hkv, D]
@group(0) @binding(3) var<storage, read_write> attn: array<f32>; // [B, H, Tq, Tk]

@compute @workgroup_size(LANES)
fn naive_scores(@builtin(global_invocation_id) global: vec3<u32>) {
  let id = offset_invocation(global, LANES);
  let key = id.x;
  let row = id.y;
  let bh = id.z;
  if (key >= keys_seen(row)) {
    return;
  }
  var s = 0.0;
  for (var d = 0u; d < HEAD_DIM; d++) {
    s += q[q_start(bh, row) + d] * k[kv_start(bh, key) + d];
  }
  attn[(bh * params.n_q + row) * params.n_k + key] = s * params.scale;
}
