package server

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// Membership is the record of the cluster's members, join tokens and grants.
type Membership interface {
	AddToken(ctx context.Context, t cluster.TokenRecord, life time.Duration) error
	Token(ctx context.Context, id string) (cluster.TokenRecord, error)
	Tokens(ctx context.Context) ([]cluster.TokenRecord, error)
	RevokeToken(ctx context.Context, id string) error
	Enrol(ctx context.Context, m cluster.Member, again bool) (cluster.Member, error)
	Renewed(ctx context.Context, role peering.Role, name string) error
	Members(ctx context.Context) ([]cluster.Member, error)
	Evict(ctx context.Context, role peering.Role, name string) error
	AddGrant(ctx context.Context, g cluster.Grant) (cluster.Grant, error)
	Grants(ctx context.Context) ([]cluster.Grant, error)
	GrantsOf(ctx context.Context, use string) ([]cluster.Grant, error)
	RevokeGrant(ctx context.Context, id uint64) error
	GrantFor(ctx context.Context, q cluster.ForUse, now meta.Time) ([]cluster.Grant, error)
	EndUse(ctx context.Context, who, use string, asOf int64) (n int64, err error)
	Revision(ctx context.Context) (int64, error)
	SetSettings(ctx context.Context, s cluster.Settings) error
}

// Trust is what a server needs to admit members to the cluster. Every meta server has a Trust,
// so that certificates are renewed as long as any meta server lives.
type Trust struct {
	Members   Membership
	Authority func(context.Context) (*peering.Authority, error)
	// ClusterKey opens the authority's key. A joining meta server gets ClusterKey.
	ClusterKey []byte
}

// maxStrangers bounds the connections without a certificate.
const maxStrangers = 16

// enrolment decides which processes may connect: it enrols processes without a certificate, renews
// certificates, and ends the connections of evicted identities.
type enrolment struct {
	*process
	chunkServers *chunkServers
	clients      *clients
	hosted       *hosted
	refusals     *peering.Refusals
	certs        seenCerts
	// strangers has a slot for each connection without a certificate.
	strangers chan struct{}
}

// stranger serves a connection without a certificate. The peer may only show one join token.
// The connection gets no session, and its frames are no longer than MaxHello.
func (en *enrolment) stranger(conn net.Conn, rd *wire.Reader, v uint8, ans *wire.Hello) error {
	const op = "join"
	select {
	case en.strangers <- struct{}{}:
		defer func() { <-en.strangers }()
	default:
		return meta.E(op, meta.Unavailable, en.cfg.Name, errors.New("too many are joining at once"))
	}
	ans.Role = wire.RoleEnrol
	if _, err := conn.Write(wire.Append(nil, v, 0, ans)); err != nil {
		return nil
	}
	t, id, body, err := rd.Next()
	if err != nil {
		return nil
	}
	m, re := new(wire.Admin), new(wire.AdminRe)
	if t == wire.TAdmin {
		err = wire.Decode(body, m)
	}
	if err != nil || t != wire.TAdmin || m.Op != wire.AdminJoin {
		err = meta.E(op, meta.AccessDenied, conn.RemoteAddr().String(), errors.New("without a certificate all one may do is show a join token"))
	} else {
		ctx, cancel := context.WithTimeout(en.ctx, 8*time.Second)
		err = en.join(ctx, m, re)
		cancel()
	}
	if err != nil {
		en.refusals.Warn(en.log, "nobody joined", "peer", conn.RemoteAddr().String(), "error", err)
	}
	re.Status = wire.StatusOf(err)
	conn.Write(wire.Append(nil, v, id, re))
	return nil
}

// join signs the first certificate of the bearer of a join token. The error does not say why a
// token is not valid.
func (en *enrolment) join(ctx context.Context, m *wire.Admin, re *wire.AdminRe) error {
	const op = "join"
	var q wire.JoinRequest
	if err := json.Unmarshal(m.Body, &q); err != nil {
		return meta.E(op, meta.Invalid, "", err)
	}
	no := meta.E(op, meta.AccessDenied, q.Name, errors.New("the token is not valid: its time is over, it was revoked, or it was never made"))
	token, err := peering.ParseToken(q.Token)
	if err != nil {
		return no
	}
	if en.cfg.Trust == nil {
		return meta.E(op, meta.NotSupported, en.cfg.Name, errors.New("this cluster has no certificates"))
	}
	have, err := en.cfg.Trust.Members.Token(ctx, token.ID)
	if errors.Is(err, meta.NotFound) {
		return no
	}
	if err != nil {
		return err
	}
	if !token.Matches(have.Hash) || token.Role != have.Role {
		return no
	}
	if have.Name != "" && q.Name != have.Name {
		return meta.E(op, meta.AccessDenied, q.Name, fmt.Errorf("the token is for the name %s", have.Name))
	}
	id := peering.Identity{Cluster: en.cfg.Cluster.ID(), Role: have.Role, Name: q.Name}
	a, err := en.cfg.Trust.Authority(ctx)
	if err != nil {
		return err
	}
	request, err := peering.CheckRequest(id, q.Request)
	if err != nil {
		return err // before anything is noted
	}
	// Record the member before the certificate leaves the server: every name in use is on the
	// list.
	member := cluster.Member{Role: id.Role, Name: id.Name, Joined: meta.Time(time.Now().UnixNano()), Token: token.ID, Key: peering.KeyDigest(request)}
	if member, err = en.cfg.Trust.Members.Enrol(ctx, member, have.Name != ""); err != nil {
		return err
	}
	id.Admission = member.Admission
	chain, err := a.Sign(id, q.Request)
	if err != nil {
		return err
	}
	en.log.Info("a process joined the cluster", "identity", id.String(), "token", token.ID)
	a2 := wire.JoinAnswer{Cluster: id.Cluster, Role: string(id.Role), Name: id.Name, Chain: chain, Authority: a.CertPEM()}
	if id.Role == peering.Meta {
		a2.Key = en.cfg.Trust.ClusterKey
	}
	return reportJSON(re, a2)
}

// Renewed records that an identity got another certificate. A failure is only logged:
// certificates are renewed without etcd, too, and the next renewal is recorded.
func (t *Trust) Renewed(ctx context.Context, who peering.Identity, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(ctx, currentWait)
	defer cancel()
	if err := t.Members.Renewed(ctx, who.Role, who.Name); err != nil {
		log.Warn("the renewal of a certificate could not be recorded; the next renewal will be", "identity", who.String(), "error", err)
	}
}

// renew signs a new certificate for an identity with a valid certificate.
func (en *enrolment) renew(ctx context.Context, who peering.Identity, request []byte) (chain []byte, err error) {
	const op = "renew certificate"
	if who.Role == "" {
		return nil, meta.E(op, meta.AccessDenied, who.String(), errors.New("it has no certificate to renew"))
	}
	if en.cfg.Trust == nil {
		return nil, meta.E(op, meta.NotSupported, en.cfg.Name, errors.New("this cluster has no certificates"))
	}
	a, err := en.cfg.Trust.Authority(ctx)
	if err != nil {
		return nil, err
	}
	if chain, err = a.Sign(who, request); err != nil {
		return nil, err
	}
	en.log.Info("a certificate was renewed", "identity", who.String())
	next, err := peering.IdentityIn(chain)
	if err != nil {
		return nil, err
	}
	en.certs.signed(next)
	en.cfg.Trust.Renewed(ctx, who, en.log)
	return chain, nil
}

// trust returns the Trust for the methods about identities. Errors: NotSupported.
func (en *enrolment) trust() (*Trust, error) {
	if en.cfg.Trust == nil {
		return nil, meta.E("admin", meta.NotSupported, en.cfg.Name, errors.New("this cluster has no certificates, and can't tell clients apart; 'penstock cluster init' makes a cluster with certificates"))
	}
	return en.cfg.Trust, nil
}

// makeToken makes a join token. Only the answer contains the token's secret.
func (t *Trust) makeToken(ctx context.Context, role peering.Role, name string, life time.Duration) (token peering.Token, err error) {
	if _, err := peering.ParseRole(string(role)); err != nil {
		return token, err
	}
	if name != "" {
		if err := peering.CheckName(name); err != nil {
			return token, err
		}
	}
	a, err := t.Authority(ctx)
	if err != nil {
		return token, err
	}
	token = peering.NewToken(role, a.Fingerprint())
	return token, t.Members.AddToken(ctx, cluster.TokenRecord{
		ID: token.ID, Role: role, Name: name, Hash: token.SecretHash(), Expires: meta.Time(time.Now().Add(life).UnixNano()),
	}, life)
}

// grantsAfter is the page of grants with numbers above after, by number.
func grantsAfter(all []cluster.Grant, after uint64) []cluster.Grant {
	i, _ := slices.BinarySearchFunc(all, after+1, func(g cluster.Grant, id uint64) int { return cmp.Compare(g.ID, id) })
	return pageOf(all[i:], jsonSize)
}

// mayConnect refuses an evicted identity, and a role that the certificate does not permit.
func (en *enrolment) mayConnect(who peering.Identity, as wire.Role) error {
	evicted := func(v *cluster.View) bool { return v != nil && who.Role != "" && v.Evicted(who) }
	no := evicted(en.cfg.Cluster.View())
	if no {
		// Another server may have admitted the identity again a moment ago.
		ctx, cancel := context.WithTimeout(en.ctx, currentWait)
		v, err := en.cfg.Cluster.Current(ctx)
		cancel()
		no = err != nil || evicted(v)
	}
	if no {
		return meta.E("hello", meta.AccessDenied, who.String(), errors.New("it was evicted from the cluster"))
	}
	return maySpeak(who, as)
}

// guardLoop applies every new view of the cluster: evictions, revoked grants, and capability
// keys.
func (en *enrolment) guardLoop() {
	for {
		changed := en.cfg.Cluster.Changed()
		en.guard()
		if view := en.cfg.Cluster.View(); view != nil {
			en.chunkServers.takeKeys(view)
		}
		select {
		case <-changed:
		case <-en.ctx.Done():
			return
		}
	}
}

// guard ends sessions with an evicted identity, takes volumes from sessions whose grants for
// the volumes were revoked, and closes the connections of evicted chunk servers.
func (en *enrolment) guard() {
	view := en.cfg.Cluster.View()
	if view == nil || en.cfg.Unsafe.NoRevoke {
		return
	}
	for _, sess := range en.clients.all() {
		if sess.who.Role == "" {
			continue
		}
		if view.Evicted(sess.who) {
			en.clients.endSession(sess, errors.New("its identity was evicted"))
			continue
		}
		for _, v := range sess.lostVolumes(view) {
			en.log.Warn("a grant was revoked", "session", sess.name, "identity", sess.who.String(), "volume", v)
			if o := en.hosted.opened(v); o != nil {
				// The session's open chunks are sealed under a higher fence, which voids every
				// capability to append. The session may enter again with the grants left.
				o.endSession(sess.id, sess)
				sess.enqueue(0, &wire.Moved{Volume: v})
				sess.flush()
			}
		}
	}
	for _, l := range en.chunkServers.all() {
		if l.who.Role != "" && view.Evicted(l.who) {
			l.conn.Close()
		}
	}
}
