package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// Join exchanges a token for the first credentials and stores them in dir. Join accepts only
// servers of the authority named by the token. After Unavailable, or after the joining process
// was killed, a call with the same dir continues, also with another token: Join shows the same
// key, by which servers recognize the holder of the name. Errors: AccessDenied (the token is
// not valid, or the server is not of the cluster), Exists (the name is taken, or dir holds
// credentials), Unavailable.
func Join(ctx context.Context, addrs []string, text, name, dir string) (peer.Identity, error) {
	const op = "join"
	token, err := peer.ParseToken(text)
	if err != nil {
		return peer.Identity{}, err
	}
	if err := peer.CheckName(name); err != nil {
		return peer.Identity{}, err
	}
	_, absent := os.Lstat(dir)
	key, request, made, err := peer.JoiningKey(dir)
	if err != nil {
		return peer.Identity{}, err
	}
	var errs []error
	for _, addr := range addrs {
		a, ca, err := joinAt(ctx, addr, token, text, name, request)
		kind := meta.KindOf(err)
		if kind == meta.Unavailable || kind == meta.Canceled && ctx.Err() == nil { // Canceled: the server is shutting down
			errs = append(errs, fmt.Errorf("%s: %w", addr, err))
			continue
		}
		refused := false // and the servers noted nothing for this key
		switch kind {
		case meta.AccessDenied, meta.Invalid, meta.NotSupported:
			// This server noted nothing. A server asked before may have noted the name for
			// this key.
			refused = made && len(errs) == 0
		case meta.Exists: // the name is another key's
			refused = true
		}
		if refused {
			err = errors.Join(err, peer.ForgetJoiningKey(dir))
			if absent != nil {
				os.Remove(dir) // JoiningKey made dir; Remove fails if dir holds anything else
			}
		}
		if err != nil {
			return peer.Identity{}, err
		}
		id := peer.Identity{Cluster: a.Cluster, Role: token.Role, Name: name}
		return id, peer.Save(dir, id, key, a.Chain, ca, a.Key)
	}
	return peer.Identity{}, meta.E(op, meta.Unavailable, "", errors.Join(errs...))
}

func joinAt(ctx context.Context, addr string, token peer.Token, text, name string, request []byte) (a wire.JoinAnswer, ca []byte, err error) {
	const op = "join"
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	conn, ca, err := peer.DialStranger(ctx, addr, token.Authority)
	if err != nil {
		return a, nil, err
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	conn.SetDeadline(deadline)
	body, err := json.Marshal(wire.JoinRequest{Token: text, Name: name, Request: request})
	if err != nil {
		panic("client: a request is plain data: " + err.Error())
	}
	frames := wire.Append(nil, wire.Version, 0, &wire.Hello{Min: wire.Version, Max: wire.Version, Role: wire.RoleEnrol, Name: name})
	if _, err := conn.Write(wire.Append(frames, wire.Version, 1, &wire.Admin{Op: wire.AdminJoin, Body: body})); err != nil {
		return a, nil, meta.E(op, meta.Unavailable, addr, err)
	}
	rd := wire.NewReader(conn)
	var hello wire.Hello
	var re wire.AdminRe
	for _, m := range []wire.Message{&hello, &re} {
		_, _, body, err := rd.Next()
		if err != nil {
			return a, nil, meta.E(op, meta.Unavailable, addr, err)
		}
		if err := wire.Decode(body, m); err != nil {
			return a, nil, err
		}
		if hello.Err != meta.KindOK {
			return a, nil, meta.E(op, hello.Err, addr, errors.New(hello.Detail))
		}
		rd.Trust() // the certificate was checked
	}
	if err := re.Status.Error(); err != nil {
		return a, nil, err
	}
	if err := json.Unmarshal(re.Report, &a); err != nil {
		return a, nil, meta.E(op, meta.Protocol, addr, err)
	}
	return a, ca, nil
}
