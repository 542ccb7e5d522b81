package embedded

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"penstock.io/penstock/meta"
)

// RecoverSpace frees the space of this server's old revisions and clears the alarm, as the
// function RecoverSpace does.
func (s *Server) RecoverSpace(ctx context.Context) error {
	return RecoverSpace(ctx, s.client, s.endpoint)
}

// NoSpace reports whether etcd refuses writes for lack of space (its NOSPACE alarm). Reads are
// still served.
func NoSpace(ctx context.Context, cli *clientv3.Client) (bool, error) {
	r, err := cli.AlarmList(ctx)
	if err != nil {
		return false, meta.E("list alarms", meta.Unavailable, "", err)
	}
	for _, a := range r.Alarms {
		if a.Alarm == etcdserverpb.AlarmType_NOSPACE {
			return true, nil
		}
	}
	return false, nil
}

// RecoverSpace frees the space of old revisions and clears the NOSPACE alarm. The journals'
// entries stay: afterwards the owners must checkpoint and trim. Under the alarm no checkpoint
// can be recorded, so RecoverSpace comes first. etcd counts the size of the file, not the used
// part, so RecoverSpace also shrinks the file, at one endpoint after the other; an endpoint
// does not answer for about a second per gigabyte. Errors: Unavailable. If the used part alone
// exceeds the quota, the alarm returns with the next write: then etcd must be started with a
// larger quota.
func RecoverSpace(ctx context.Context, cli *clientv3.Client, endpoints ...string) error {
	const op = "recover etcd's space"
	r, err := cli.Get(ctx, "/", clientv3.WithCountOnly())
	if err != nil {
		return meta.E(op, meta.Unavailable, "", err)
	}
	_, err = cli.Compact(ctx, r.Header.Revision, clientv3.WithCompactPhysical())
	if err != nil && !errors.Is(err, rpctypes.ErrCompacted) {
		return meta.E(op, meta.Unavailable, "", err)
	}
	for _, e := range endpoints {
		if err := defragment(ctx, cli, e); err != nil {
			return meta.E(op, meta.Unavailable, e, err)
		}
	}
	alarms, err := cli.AlarmList(ctx)
	if err != nil {
		return meta.E(op, meta.Unavailable, "", err)
	}
	for _, a := range alarms.Alarms {
		if a.Alarm != etcdserverpb.AlarmType_NOSPACE {
			continue
		}
		if _, err := cli.AlarmDisarm(ctx, &clientv3.AlarmMember{MemberID: a.MemberID, Alarm: a.Alarm}); err != nil {
			return meta.E(op, meta.Unavailable, "", err)
		}
	}
	return nil
}

// Reliever frees space in an etcd of several members that several processes share. A member
// does not answer during defragmentation, so a Reliever works only under the alarm, not
// continuously.
type Reliever struct {
	cli       *clientv3.Client
	endpoints []string

	mu   sync.Mutex
	next time.Time
}

// relieveEvery is the least time between two attempts of one process.
const relieveEvery = 5 * time.Second

// NewReliever makes a Reliever that uses a client of the endpoints.
func NewReliever(cli *clientv3.Client, endpoints []string) *Reliever {
	return &Reliever{cli: cli, endpoints: endpoints}
}

// Relieve frees space if etcd refuses writes for lack of space, unless the last attempt was a
// moment ago. Errors: Unavailable.
func (r *Reliever) Relieve(ctx context.Context) error {
	full, err := NoSpace(ctx, r.cli)
	if err != nil || !full {
		return err
	}
	r.mu.Lock()
	if time.Now().Before(r.next) {
		r.mu.Unlock()
		return nil
	}
	// Other processes see the alarm, too, and draw other moments.
	r.next = time.Now().Add(relieveEvery + rand.N(relieveEvery))
	r.mu.Unlock()
	return RecoverSpace(ctx, r.cli, r.endpoints...)
}

// defragment shrinks the file of one server. The call always dials a socket: with the client
// within a process, etcd 3.6.16 panics, because that client's maintenance service lacks a part.
func defragment(ctx context.Context, cli *clientv3.Client, endpoint string) error {
	if strings.HasPrefix(endpoint, "unix:") {
		own, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, Logger: zap.NewNop()})
		if err != nil {
			return err
		}
		defer own.Close()
		cli = own
	}
	_, err := cli.Defragment(ctx, endpoint)
	return err
}
