// Decoding, second of two dispatches: the parts of the keys that were walked apart are merged.
//
//   L = ln Σ_p exp(L_p)     O = Σ_p exp(L_p - L) O_p
//
// It is the merge of the online softmax, for any number of parts at once: a part's O is already divided by its own sum,
// whose logarithm stands in its L.
//
// A workgroup owns LANES numbers of one output row, an invocation one of them. A part takes part if the row sees its
// first key, which is a fact about positions. Dispatch: x = ceil(D / LANES), y = Tq, z = B·H.
//
// Constants: LANES, HEAD_DIM, SPLIT_KEYS; alias Element (of O). Snippets: problem.wgsl.
// Source: Dao et al., "Flash-Decoding for long-context inference", 2023; the merge is that of Milakov and Gimelshein,
// arXiv:1805.02867, section 3.1.

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> part_out: array<f32>;      // [parts, B, Tq, H, D]
@group(0) @binding(2) var<storage, read> part_lse: array<f32>;      // [parts, B, H, Tq]
@group(0) @binding(3) var<storage, read_write> out: array<Element>; // [B, Tq, H, D]
@group(0) @binding(4) var<storage, read_write> lse: array<f32>;     // [B, H, Tq]

@compute @workgroup_size(LANES)
fn fa2_merge(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let workgroup = offset_id(id);
  let d = workgroup.x * LANES + lane;
  let row = workgroup.y;
  let bh = workgroup.z;
  if (d >= HEAD_DIM) {
    return;
  }
  let n_rows = params.n_batch * params.n_heads * params.n_q;
  let n_parts = ceil_div(keys_seen(row), SPLIT_KEYS);
  let at_lse = bh * params.n_q + row;
  let at_out = q_start(bh, row) + d;

  var m = M_NONE;
  for (var p = 0u; p < n_parts; p++) {
    m = max(m, part_lse[p * n_rows + at_lse]);
  }
  var l = 0.0;
  var o = 0.0;
  for (var p = 0u; p < n_parts; p++) {
    let weight = exp_shift(part_lse[p * n_rows + at_lse] - m);
    l += weight;
    o += weight * part_out[p * n_rows * HEAD_DIM + at_out];
  }
  out[at_out] = Element(select(o / l, 0.0, n_parts == 0u));
  if (d == 0u) {
    lse[at_lse] = select(m + log_sum(l), params.neg_inf, n_parts == 0u);
  }
}
