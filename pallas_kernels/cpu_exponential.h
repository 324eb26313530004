// The exponential over any kind of lanes. Included by a kernel inside a namespace, after a file of
// lanes.

// e^x for x <= 0, or NaN: n = round(x / ln 2), r = x - n ln 2 in two parts, e^r by the polynomial
// of Cephes' expf (S. Moshier). At most 1.02 units in the last place off, as tried with every
// float; 0 below -87.
ZEN_LANES Lanes exponential(Lanes x) {
  const Lanes shifted = fma(x, fill(1.44269504088896341f), fill(12582912.0f));
  const Lanes n = sub(shifted, fill(12582912.0f));
  Lanes r = fma(n, fill(-0.693359375f), x);
  r = fma(n, fill(2.12194440e-4f), r);
  Lanes p = fill(1.9875691500e-4f);
  p = fma(p, r, fill(1.3981999507e-3f));
  p = fma(p, r, fill(8.3334519073e-3f));
  p = fma(p, r, fill(4.1665795894e-2f));
  p = fma(p, r, fill(1.6666665459e-1f));
  p = fma(p, r, fill(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), fill(1.0f));
  return zero_below(x, -87.0f, mul(p, power_of_two(shifted)));
}
