package server

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// peers are the cluster's other metadata servers.
type peers struct {
	*process
	adminFrames  *adminFrames
	chunkServers *chunkServers
	clients      *clients
	hosted       *hosted
}

// others lists the live meta servers except this server.
func (ps *peers) others() (l []cluster.MetaServer) {
	view := ps.cfg.Cluster.View()
	if view == nil {
		return nil
	}
	for _, m := range view.MetaServers {
		if m.Name != ps.cfg.Name {
			l = append(l, m)
		}
	}
	return l
}

// askPeer sends a request to another meta server and returns the reply. Errors: Unavailable,
// AccessDenied, Protocol, Version.
func (ps *peers) askPeer(ctx context.Context, addr string, m *wire.Admin) (*wire.AdminRe, error) {
	conn, err := peering.Dial(ctx, addr, ps.cfg.Creds, peering.Meta)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	hello := wire.Hello{Min: wire.Version, Max: wire.Version, Role: wire.RolePeer, Name: ps.cfg.Name, Cluster: ps.cfg.Cluster.ID()}
	rd := wire.NewReader(conn)
	ask := wire.Append(nil, wire.Version, 0, &hello)
	var ans wire.Hello
	var re wire.AdminRe
	for i, into := range []wire.Message{&ans, &re} {
		if _, err := conn.Write(ask); err != nil {
			return nil, meta.E("ask server", meta.Unavailable, addr, err)
		}
		t, _, body, err := rd.Next()
		if err != nil {
			return nil, meta.E("ask server", meta.Unavailable, addr, err)
		}
		if want := []wire.Type{wire.THello, wire.TAdminRe}[i]; t != want {
			return nil, meta.E("ask server", meta.Protocol, addr, fmt.Errorf("frame type %d", t))
		}
		if err := wire.Decode(body, into); err != nil {
			return nil, err
		}
		if ans.Err != meta.KindOK {
			return nil, meta.E("ask server", ans.Err, addr, errors.New(ans.Detail))
		}
		if i == 0 {
			v, ok := wire.Negotiate(&ans)
			if !ok {
				return nil, meta.E("ask server", meta.Version, addr, fmt.Errorf("the server speaks protocol versions %d to %d, this server speaks version %d", ans.Min, ans.Max, wire.Version))
			}
			rd.Trust()
			if ask, err = wire.Encode(nil, v, 1, m); err != nil {
				return nil, err
			}
		}
	}
	return &re, nil
}

// servePeer answers another meta server's requests, one at a time.
func (ps *peers) servePeer(conn net.Conn, rd *wire.Reader, v uint8, who *session) {
	for {
		t, id, body, err := rd.Next()
		if err != nil || t != wire.TAdmin || maySend(who.who, t) != nil {
			return
		}
		m := new(wire.Admin)
		if wire.Decode(body, m) != nil {
			return
		}
		frame, err := wire.Encode(nil, v, id, ps.adminFrames.admin(ps.ctx, who, m))
		if err != nil {
			frame = wire.Append(nil, v, id, &wire.AdminRe{Status: wire.StatusOf(err)})
		}
		if _, err := conn.Write(frame); err != nil {
			return
		}
	}
}

// atOwner calls here with the owner of a volume, or, if another server owns the volume, sends
// there to that server and passes the answer to to, if not nil.
func (ps *peers) atOwner(ctx context.Context, v meta.VolumeID, here func(*owner) error, there *wire.Admin, to func(*wire.AdminRe) error) error {
	return ps.whereOwned(ctx, v, here, func(addr string) error {
		re, err := ps.askPeer(ctx, addr, there)
		if err == nil {
			err = re.Status.Error()
		}
		if err == nil && to != nil {
			err = to(re)
		}
		return err
	})
}

// whereOwned calls here with the owner of a volume, or, if another server owns the volume,
// calls there with that server's address. While the error is NotOwner or Unavailable, it tries
// again, until ctx ends.
func (ps *peers) whereOwned(ctx context.Context, v meta.VolumeID, here func(*owner) error, there func(addr string) error) error {
	for {
		o, err := ps.hosted.ownerFor(ctx, v)
		if err == nil {
			err = here(o)
		}
		var e *meta.Error
		if errors.As(err, &e) && e.Kind == meta.NotOwner && e.Subject != "" && e.Subject != ps.cfg.Addr {
			err = there(e.Subject)
		}
		if !errors.Is(err, meta.NotOwner) && !errors.Is(err, meta.Unavailable) {
			return err
		}
		// The volume is changing its owner.
		select {
		case <-time.After(peerPause):
		case <-ctx.Done():
			return err
		}
	}
}

// metaList is the list of meta servers sent to sessions and chunk servers.
func (ps *peers) metaList() *wire.Metas {
	m := &wire.Metas{}
	if view := ps.cfg.Cluster.View(); view != nil {
		for _, x := range view.MetaServers {
			m.Servers = append(m.Servers, wire.MetaServer{Name: x.Name, Addr: x.Addr})
		}
	}
	return m
}

// tellMetas sends the list of meta servers to all sessions and chunk servers connected.
func (ps *peers) tellMetas() {
	m := ps.metaList()
	for _, sess := range ps.clients.all() {
		sess.enqueue(0, m)
		go sess.flush()
	}
	for _, l := range ps.chunkServers.all() {
		l.send.Enqueue(0, m)
		go l.send.Flush()
	}
}

// placesIn returns the places of chunks of a single volume. Chunks without a record have no
// servers. With seal, open chunks are sealed first.
func (ps *peers) placesIn(ctx context.Context, v meta.VolumeID, ids []meta.ChunkID, seal bool) (places []meta.ChunkPlace, err error) {
	entry := ""
	if seal {
		entry = sealFirst
	}
	names := make([]string, len(ids))
	for i, id := range ids {
		b := id.Bytes()
		names[i] = hex.EncodeToString(b[:])
	}
	body, err := json.Marshal(names)
	if err != nil {
		panic("server: names are plain data: " + err.Error())
	}
	err = ps.atOwner(ctx, v, func(o *owner) (err error) {
		places, err = o.foreign.placesOf(ctx, ids, seal)
		return err
	}, &wire.Admin{Op: wire.AdminChunkPlaces, Volume: v, Entry: entry, Body: body}, func(re *wire.AdminRe) error {
		var l []wire.ChunkWhere
		if err := json.Unmarshal(re.Report, &l); err != nil || len(l) != len(ids) {
			return meta.E("place chunks", meta.Protocol, fmt.Sprint(v), err)
		}
		for i, w := range l {
			places = append(places, meta.ChunkPlace{ID: ids[i], Servers: w.Servers, Sealed: w.Sealed, Length: w.Length})
		}
		return nil
	})
	return places, err
}

// pathElsewhere asks the owner of a volume for the path of a directory.
func (ps *peers) pathElsewhere(ctx context.Context, addr string, v meta.VolumeID, dir meta.Ino) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	re, err := ps.askPeer(ctx, addr, &wire.Admin{Op: wire.AdminPathOf, Volume: v, Ino: dir})
	if err == nil {
		err = re.Status.Error()
	}
	if err != nil {
		return nil, err
	}
	var names []string
	if err := json.Unmarshal(re.Report, &names); err != nil {
		return nil, meta.E("name a directory", meta.Protocol, fmt.Sprint(dir), err)
	}
	return names, nil
}

// settleOrigin notifies the owner of a clone's origin that the clone is gone. If the
// notification fails, the origin's owner finds out later from the table of volumes.
func (ps *peers) settleOrigin(ctx context.Context, from *cluster.Origin) {
	if from == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), peerPatience)
	defer cancel()
	err := ps.atOwner(ctx, from.Volume, func(o *owner) error { return o.clones.cloneGone(ctx) },
		&wire.Admin{Op: wire.AdminCloneSettle, Volume: from.Volume}, nil)
	if err != nil {
		ps.log.Info("the origin could not be told that its clone is gone; the origin finds out later", "origin", from.Volume, "error", err)
	}
}
