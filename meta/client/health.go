package client

import (
	"context"
	"encoding/json"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// Health asks one metadata server what it knows of what might be wrong. Errors:
// NotSupported (it is of a version before), AccessDenied, Unavailable.
func (s *Session) Health(ctx context.Context, addr string, q meta.HealthRequest) (h meta.ServerHealth, err error) {
	body, err := json.Marshal(q)
	if err != nil {
		panic("client: a request is plain data: " + err.Error())
	}
	re, err := s.AdminAt(ctx, addr, wire.Admin{Op: wire.AdminHealth, Body: body})
	if err == nil {
		if err = json.Unmarshal(re.Report, &h); err != nil {
			err = meta.E("health", meta.Protocol, addr, err)
		}
	}
	return h, err
}
