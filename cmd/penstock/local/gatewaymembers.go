package local

import (
	"context"
	"crypto/tls"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/stream"
)

// gatewayMembers are the clients of the cluster that log in at a gateway with their certificates of
// the cluster: mounts, which append the lines of in.jsonl. What the grants of a client permit, a
// metadata server tells.
type gatewayMembers struct {
	creds *peer.Credentials
	users *stream.Users
	ask   func(context.Context, *admin.GetAccessRequest) (*admin.GetAccessResponse, error)

	mu    sync.Mutex
	known map[memberIn]memberAccess
}

// memberIn is a client in a volume.
type memberIn struct {
	client    string
	admission uint32
	volume    meta.VolumeID
}

// memberAccess is what a metadata server told.
type memberAccess struct {
	user  stream.User
	most  stream.Permission
	until time.Time
}

const (
	// memberFor is how long a gateway goes by what a metadata server has told of a client.
	memberFor  = 3 * time.Second
	maxMembers = 4096
	// nobodyID is the user and the group that a grant makes of root (root-squash).
	nobodyID = 65534
)

// serveMembers reports whether a gateway lets clients of the cluster log in with their certificates:
// the gateway asks for logins, speaks TLS, and has a certificate of a gateway.
func (cfg *GatewayConfig) serveMembers() bool {
	return cfg.Users != "" && cfg.Cert != "" && cfg.Creds.Identity().Role == peer.Gateway
}

// login returns the login of a client that has asked for the gateway's certificate of the cluster; nil
// for another client. Errors: AccessDenied.
func (m *gatewayMembers) login(st tls.ConnectionState) (*stream.Login, error) {
	if st.ServerName != peer.GatewayServer {
		return nil, nil
	}
	who, err := m.creds.ClientOf(st)
	if err != nil {
		return nil, meta.E("log in", meta.AccessDenied, "client of the cluster", err)
	}
	return m.users.BeginMember(who.String(), func(ctx context.Context, volume meta.VolumeID) (stream.User, stream.Permission, error) {
		if _, err := m.creds.ClientOf(st); err != nil { // expired
			return stream.User{}, 0, meta.E("log in", meta.AccessDenied, who.String(), err)
		}
		a, err := m.access(ctx, memberIn{who.String(), who.Admission, volume})
		return a.user, a.most, err
	}), nil
}

// access returns what the grants of a client permit in a volume. Errors: AccessDenied (the client was
// evicted), Unavailable.
func (m *gatewayMembers) access(ctx context.Context, of memberIn) (memberAccess, error) {
	m.mu.Lock()
	a, ok := m.known[of]
	m.mu.Unlock()
	if ok && time.Now().Before(a.until) {
		return a, nil
	}
	until := time.Now().Add(memberFor)
	r, err := m.ask(ctx, &admin.GetAccessRequest{Client: of.client, Admission: of.admission, Volume: uint32(of.volume)})
	if err != nil {
		return memberAccess{}, err
	}
	a = memberAccess{user: stream.User{GIDs: []uint32{0}}, until: until}
	switch r.Users {
	case admin.Users_USERS_ROOT_SQUASH:
		a.user = stream.User{UID: nobodyID, GIDs: []uint32{nobodyID}}
	case admin.Users_USERS_ALL_TO:
		a.user = stream.User{UID: r.Uid, GIDs: []uint32{r.Gid}}
	}
	switch {
	case r.Rights >= admin.Right_RIGHT_WRITE:
		a.most = stream.MaySearch | stream.MayRead | stream.MayWrite
	case r.Rights >= admin.Right_RIGHT_READ:
		a.most = stream.MaySearch | stream.MayRead
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.known == nil || len(m.known) >= maxMembers {
		m.known = map[memberIn]memberAccess{}
	}
	m.known[of] = a
	return a, nil
}
