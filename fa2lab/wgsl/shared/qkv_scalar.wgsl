// Q, K and V by the vec4, for any D: a row's last vec4 is filled up with zeros, not with the next row.
// Expects: q, k, v: array<Stored>. Constants: HEAD_DIM; alias Stored = f32 or f16.

fn q_vec4(start: u32, chunk: u32) -> vec4<f32> {
  var value = vec4<f32>();
  for (var d = chunk * 4u; d < min(chunk * 4u + 4u, HEAD_DIM); d++) {
    value[d % 4u] = f32(q[start + d]);
  }
  return value;
}

fn k_vec4(start: u32, chunk: u32) -> vec4<f32> {
  var value = vec4<f32>();
  for (var d = chunk * 4u; d < min(chunk * 4u + 4u, HEAD_DIM); d++) {
    value[d % 4u] = f32(k[start + d]);
  }
  return value;
}

fn v_vec4(start: u32, chunk: u32) -> vec4<f32> {
  var value = vec4<f32>();
  for (var d = chunk * 4u; d < min(chunk * 4u + 4u, HEAD_DIM); d++) {
    value[d % 4u] = f32(v[start + d]);
  }
  return value;
}
