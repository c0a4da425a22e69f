// Attention with the softmax and P·V fused: one dispatch, one invocation a query row.
//
//   S = scale · Q Kᵀ     P = softmax(S)     O = P V     L = ln Σ exp(S)
//
// An invocation keeps its whole row of scores in private memory, so the keys are bounded: 4 bytes a key, 4 KiB at
// 1024 keys, more than registers hold; compilers spill it. It first takes the maximum, then the exponentials and
// their sum, then O a column at a time. Every row still reads all of K and V from global memory.
// Dispatch: x = ceil(Tq / LANES), y = B·H.
//
// Constants: LANES, HEAD_DIM, MAX_KEYS (a power of two that holds Tk, at most 1024); WRITE_ATTN also writes P.
// Snippets: problem.wgsl.
// Source: the fused attention that FlashAttention-2 replaces here; Milakov and Gimelshein, arXiv:1805.02867,
// algorithm 2 (the safe softmax).

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> q: array<f32>;          // [B, Tq, H, D]
@group(0) @binding(2) var<storage, read> k: array<f32>;          // [B, Tk, Hkv, D]
@group(0) @binding(3) var<storage, read> v: array<f32>;          // [B, Tk, Hkv, D]
@group(0) @binding(4) var<storage, read_write> out: array<f32>;  // [B, Tq, H, D]
@group(0) @binding(5) var<storage, read_write> lse: array<f32>;  // [B, H, Tq]
@group(0) @binding(6) var<storage, read_write> attn: array<f32>; // [B, H, Tq, Tk] if WRITE_ATTN

@compute @workgroup_size(LANES)
fn fused_sv(@builtin(global_invocation_id) global: vec3<u32>) {
  let id = offset_invocation(global, LANES);
  let row = id.x;
  let bh = id.y;
  if (row >= params.n_q) {
    return;
  }
  let seen = keys_seen(row);
  let q_row = q_start(bh, row);

  var s: array<f32, MAX_KEYS>;
  var m = M_NONE;
  for (var key = 0u; key < seen; key++) {
    let k_row = kv_start(bh, key);
    var dot = 0.0;
    for (var d = 0u; d < HEAD_DIM; d++) {
      dot += q[q_row + d] * k[k_row + d];
    }
    s[key] = dot * params.scale;
    m = max(m, s[key]);
  }

  var l = 0.0;
  for (var key = 0u; key < seen; key++) {
    s[key] = exp_shift(s[key] - m);
    l += s[key];
  }

  for (var d = 0u; d < HEAD_DIM; d++) {
    var o = 0.0;
    for (var key = 0u; key < seen; key++) {
      o += s[key] * v[kv_start(bh, key) + d];
    }
    out[q_row + d] = select(o / l, 0.0, seen == 0u);
  }
  lse[bh * params.n_q + row] = select(m + log_sum(l), params.neg_inf, seen == 0u);

  if (WRITE_ATTN) {
    for (var key = 0u; key < seen; key++) {
      attn[(bh * params.n_q + row) * params.n_k + key] = s[key] / l;
    }
  }
}
