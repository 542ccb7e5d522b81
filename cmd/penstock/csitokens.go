package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/types/known/durationpb"

	"penstock.io/penstock/cmd/penstock/kube"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/peer"
)

// A pod of the driver without credentials joins by a token in a Secret: the controller's pod
// at each start, a node's pod at its first start. A token is valid for a month at most, to
// bound the damage by a thief of the token, but a Kubernetes cluster gets new nodes for years.
// So the controller, which is an administrator of the cluster anyway, puts a new token into
// each Secret after half of the old token's life. If several controllers do so at once, one
// controller wins.

// tokenEvery is the time between two checks; tokenAgain is the time after a failed check.
const (
	tokenEvery = 10 * time.Minute
	tokenAgain = 30 * time.Second
	tokenKey   = "token" // in the Secret
)

// keptToken is a Secret, and the role and name under which holders of its token may join.
type keptToken struct {
	secret string
	role   peer.Role
	name   string // the only permitted name; "": any new name
}

// parseKeptToken reads SECRET=ROLE[:NAME].
func parseKeptToken(s string) (k keptToken, err error) {
	secret, what, found := strings.Cut(s, "=")
	role, name, _ := strings.Cut(what, ":")
	if !found || secret == "" {
		return k, fmt.Errorf("%q is not SECRET=ROLE[:NAME]", s)
	}
	k = keptToken{secret: secret, name: name}
	if k.role, err = peer.ParseRole(role); err != nil {
		return k, err
	}
	if name != "" {
		err = peer.CheckName(name)
	}
	return k, err
}

// tokenKeeper replaces the join tokens in Secrets before the tokens expire.
type tokenKeeper struct {
	api    *kube.API
	with   func(ctx context.Context, work func(*admin.Client) error) error
	tokens []keptToken
	life   time.Duration // of a new token
	log    *slog.Logger

	mu   sync.Mutex
	ends map[string]time.Time // of the token in each Secret; absent: not known yet
	well map[string]bool      // Secrets with a valid token after the last check
}

// Describe sends nothing: the set of metrics depends on the checks.
func (k *tokenKeeper) Describe(chan<- *prometheus.Desc) {}

// Collect sends, for each Secret, whether the last check succeeded, and the end of the token
// if a check could read the Secret.
func (k *tokenKeeper) Collect(out chan<- prometheus.Metric) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, t := range k.tokens {
		d := prometheus.NewDesc("penstock_csi_token_kept", "1 if the last look at a Secret with a join token succeeded, and put a new token there if it was time to; 0 before the first one.", nil, prometheus.Labels{"secret": t.secret})
		well := 0.0
		if k.well[t.secret] {
			well = 1
		}
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, well)
	}
	for secret, end := range k.ends {
		d := prometheus.NewDesc("penstock_csi_token_end_timestamp_seconds", "When the join token in a Secret ends, by which pods of the driver join; 0: there is none that holds.", nil, prometheus.Labels{"secret": secret})
		at := 0.0
		if !end.IsZero() {
			at = float64(end.Unix())
		}
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, at)
	}
}

// run checks the Secrets until ctx ends.
func (k *tokenKeeper) run(ctx context.Context) {
	for ctx.Err() == nil {
		wait := tokenEvery
		if err := k.look(ctx, time.Now()); err != nil && ctx.Err() == nil {
			k.log.Error("join tokens in Secrets are not renewed: after the end of a token, a new pod of the driver can't join", "err", err)
			wait = tokenAgain
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// look checks all Secrets and replaces old and invalid tokens.
func (k *tokenKeeper) look(ctx context.Context, now time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	well := map[string]bool{}
	defer func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.well = well
	}()
	return k.with(ctx, func(c *admin.Client) error {
		holding, err := listTokens(ctx, c)
		if err != nil {
			return err
		}
		var errs []error
		for _, t := range k.tokens {
			if err := k.keep(ctx, c, t, holding, now); err != nil {
				errs = append(errs, fmt.Errorf("of the Secret %s: %w", t.secret, err))
			} else {
				well[t.secret] = true
			}
		}
		return errors.Join(errs...)
	})
}

// keep checks a single Secret and replaces an old or invalid token.
func (k *tokenKeeper) keep(ctx context.Context, c *admin.Client, t keptToken, holding []cluster.TokenRecord, now time.Time) error {
	secret, err := k.api.Secret(ctx, t.secret)
	if err != nil {
		return err
	}
	var end time.Time // zero: the token is invalid, or for another role or name
	have, bad := peer.ParseToken(string(secret.Data[tokenKey]))
	if bad == nil {
		if i := slices.IndexFunc(holding, func(r cluster.TokenRecord) bool { return r.ID == have.ID && r.Role == t.role && r.Name == t.name }); i >= 0 {
			end = time.Unix(0, int64(holding[i].Expires))
		}
	}
	k.note(t.secret, end)
	if end.Sub(now) > k.life/2 {
		return nil
	}
	made, err := c.Grants.MakeJoinToken(ctx, &admin.MakeJoinTokenRequest{Role: admin.RoleOf(t.role), Name: t.name, Life: durationpb.New(k.life)})
	if err != nil {
		return err
	}
	fresh, err := peer.ParseToken(made.Token)
	if err == nil && bad == nil && fresh.Authority != have.Authority {
		// An operator is about to move the driver to the other cluster.
		err = meta.E("replace join token", meta.NotPermitted, t.secret, errors.New("the token there is of another cluster"))
	}
	if err == nil {
		err = k.api.SetSecret(ctx, secret, tokenKey, []byte(made.Token))
	}
	if err != nil {
		// The new token is in no Secret, so revoke the token.
		_, revoked := c.Grants.RevokeJoinToken(ctx, &admin.RevokeJoinTokenRequest{Id: made.Id})
		if errors.Is(err, meta.Busy) {
			err = nil // another controller was faster; the next check reads the result
		}
		return errors.Join(err, revoked)
	}
	k.log.Info("a new join token is in a Secret", "secret", t.secret, "role", t.role, "name", t.name, "before", end, "now", now.Add(k.life))
	k.note(t.secret, now.Add(k.life))
	return nil
}

func (k *tokenKeeper) note(secret string, end time.Time) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.ends[secret] = end
}
