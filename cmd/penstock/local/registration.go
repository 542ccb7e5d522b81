package local

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"math"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/stream/placement"
)

// registration keeps a gateway on the metadata servers' list of gateways, and has the list.
type registration struct {
	client *admin.Client // nil: no metadata servers, and the gateway is alone
	log    *slog.Logger
	q      *admin.RegisterGatewayRequest

	calls  sync.Mutex // held during a call: no call comes after that of leave
	mu     sync.Mutex
	self   placement.Gateway
	live   []placement.Gateway // without self while the gateway stops
	leaves bool                // see calls
}

// gatewayName is the name under which a gateway registers: the given one, else the name of the
// certificate of a gateway, else the host's name.
func gatewayName(given string, creds *peer.Credentials) (string, error) {
	if who := creds.Identity(); who.Role == peer.Gateway {
		if given != "" && given != who.Name {
			return "", meta.E("start gateway", meta.Invalid, given, errors.New("the certificate is of the gateway "+who.Name+": leave --name out, or join with a token for the other name"))
		}
		return who.Name, nil
	}
	if given != "" {
		return given, peer.CheckName(given)
	}
	host, err := os.Hostname()
	if err != nil {
		return "", meta.E("start gateway", meta.Invalid, "", errors.New("the host has no name: give one with --name"))
	}
	return peer.FitName(host), nil
}

// advertised returns the address that clients are told of a server that listens at an address:
// the given one, else the address itself, with the host's name for the address of all interfaces.
func advertised(given, at string) string {
	host, port, err := net.SplitHostPort(at)
	if given != "" || at == "" || err != nil {
		return given
	}
	if ip := net.ParseIP(host); ip != nil && !ip.IsUnspecified() {
		return at
	}
	name, err := os.Hostname()
	if err != nil {
		name = host
	}
	return net.JoinHostPort(name, port)
}

// register puts a gateway on the list, and waits until a metadata server answers, and, if another
// process has the name, until the term of a gateway that ended is over. Errors: Invalid (the name),
// Exists (another process has the name), AccessDenied.
func register(ctx context.Context, cfg *GatewayConfig, kafka, ingest string) (*registration, error) {
	r := &registration{log: cfg.Logger, self: placement.Gateway{Number: 1, Kafka: kafka, Ingest: ingest}}
	r.live = []placement.Gateway{r.self}
	if len(cfg.Meta) == 0 {
		return r, nil
	}
	name, err := gatewayName(cfg.Name, cfg.Creds)
	if err != nil {
		return nil, err
	}
	r.q = &admin.RegisterGatewayRequest{Name: name, Instance: cmp.Or(cfg.Instance, rand.Text()), Kafka: kafka, Ingest: ingest, IngestTls: cfg.Cert != "", IngestMembers: cfg.serveMembers()}
	if r.client, err = admin.New(admin.Config{Addrs: cfg.Meta, Creds: cfg.Creds, Reach: math.MaxInt64}); err != nil {
		return nil, err
	}
	told := false
	for deadline := time.Now().Add(2 * cluster.GatewayTerm); ; {
		err := r.call(ctx)
		if err == nil {
			return r, nil
		}
		if !errors.Is(err, meta.Exists) && !passes(err) || errors.Is(err, meta.Exists) && time.Now().After(deadline) || ctx.Err() != nil {
			return nil, errors.Join(err, r.client.Close())
		}
		if !told {
			told = true
			r.log.Warn("the gateway is not registered yet; it tries again", "name", name, "error", err)
		}
		select {
		case <-time.After(500 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// call registers the gateway for another term, and takes the list.
func (r *registration) call(ctx context.Context) error {
	r.calls.Lock()
	defer r.calls.Unlock()
	if r.leaves {
		return nil
	}
	answer, err := r.client.Gateways.RegisterGateway(ctx, r.q)
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		if errors.Is(err, meta.Exists) {
			r.take(slices.DeleteFunc(slices.Clone(r.live), func(g placement.Gateway) bool { return g.Number == r.self.Number }))
		}
		return err
	}
	r.q.Lease = answer.Lease
	r.self.Number = int32(answer.Gateway.Number)
	var live []placement.Gateway
	for _, g := range answer.Live {
		live = append(live, placement.Gateway{Number: int32(g.Number), Kafka: g.Kafka, Ingest: g.Ingest})
	}
	r.take(live)
	return nil
}

// take takes a list. The caller holds mu.
func (r *registration) take(live []placement.Gateway) {
	if !slices.Equal(live, r.live) {
		r.log.Info("the list of gateways has changed", "gateways", len(live), "before", len(r.live))
	}
	r.live = live
}

// run registers the gateway again and again, until ctx ends.
func (r *registration) run(ctx context.Context) {
	if r.client == nil {
		return
	}
	var told time.Time
	for {
		select {
		case <-time.After(cluster.GatewayEvery):
		case <-ctx.Done():
			return
		}
		call, cancel := context.WithTimeout(ctx, cluster.GatewayTerm)
		err := r.call(call)
		cancel()
		if err == nil || ctx.Err() != nil || time.Since(told) < time.Minute {
			continue
		}
		told = time.Now()
		if errors.Is(err, meta.Exists) {
			r.log.Error("another process has registered by the name of this gateway: this gateway leads nothing any more; give each gateway a name of its own", "name", r.q.Name, "error", err)
		} else {
			r.log.Warn("the gateway could not be registered again; it tries again, and other gateways take over after the term", "name", r.q.Name, "term", cluster.GatewayTerm, "error", err)
		}
	}
}

// list returns this gateway and the live gateways.
func (r *registration) list() (self placement.Gateway, live []placement.Gateway) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.self, r.live
}

// heard is how long after a change of the list all gateways know of it.
const heard = cluster.GatewayEvery + 500*time.Millisecond

// leave takes the gateway from the list, and returns when the other gateways know. Then the gateway's
// own list does not have it either, and it leads nothing more. others reports that there are other
// gateways.
func (r *registration) leave(ctx context.Context) (others bool, err error) {
	if r.client == nil {
		return false, nil
	}
	r.calls.Lock()
	r.leaves = true
	call, cancel := context.WithTimeout(ctx, cluster.GatewayEvery)
	_, err = r.client.Gateways.UnregisterGateway(call, &admin.UnregisterGatewayRequest{Name: r.q.Name, Instance: r.q.Instance})
	cancel()
	r.calls.Unlock()
	_, live := r.list()
	live = slices.DeleteFunc(slices.Clone(live), func(g placement.Gateway) bool { return g.Number == r.self.Number })
	if len(live) == 0 || err != nil {
		return false, err
	}
	select {
	case <-time.After(heard):
	case <-ctx.Done():
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.take(live)
	return true, nil
}

// access asks a metadata server what grants let a client do. Errors: those of the call, Unavailable
// (no metadata server has answered in time).
func (r *registration) access(ctx context.Context, q *admin.GetAccessRequest) (*admin.GetAccessResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, cluster.GatewayTerm)
	defer cancel()
	answer, err := r.client.Gateways.GetAccess(ctx, q)
	if errors.Is(err, meta.Interrupted) || errors.Is(err, context.DeadlineExceeded) {
		err = meta.E("tell access", meta.Unavailable, q.Client, err)
	}
	return answer, err
}

// close ends the connections to the metadata servers.
func (r *registration) close() error {
	if r.client == nil {
		return nil
	}
	return r.client.Close()
}
