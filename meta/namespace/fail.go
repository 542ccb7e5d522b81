package namespace

import "penstock.io/penstock/meta"

// fail makes the package's errors.
func fail(op string, k meta.Kind, subject string) error { return meta.E(op, k, subject, nil) }
