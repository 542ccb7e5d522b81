package cluster

import (
	"context"
	"errors"
	"path/filepath"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster/embedded"
	"penstock.io/penstock/meta/peer"
)

// TestFoundWithoutAnswer: etcd's answer to the write that makes a cluster is lost, whether or not
// etcd carried the write out, and so is the answer to the following question. A caller that asks
// again with the same identity gets the cluster, and no other caller does.
func TestFoundWithoutAnswer(t *testing.T) {
	s, err := embedded.Start(embedded.Config{Dir: filepath.Join(t.TempDir(), "etcd")})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	good := s.Client()
	lost := status.Error(codes.Unavailable, "the answer is lost")
	var done, deaf bool // the write is done; all later answers are lost
	wrote := false
	cli, err := clientv3.New(clientv3.Config{Endpoints: []string{s.Endpoint()}, Logger: zap.NewNop(), DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(
		func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			if _, is := req.(*etcdserverpb.TxnRequest); is && !wrote {
				wrote = true
				if done {
					if err := invoke(ctx, method, req, reply, cc, opts...); err != nil {
						t.Error(err)
					}
				}
				return lost
			}
			if wrote && deaf {
				return status.Error(codes.FailedPrecondition, "nothing is heard") // not tried again
			}
			return invoke(ctx, method, req, reply, cc, opts...)
		})}})
	if err != nil {
		t.Fatal(err)
	}
	defer cli.Close()
	for _, c := range []struct {
		done, deaf, made bool
	}{{true, false, true}, {true, true, false}, {false, false, false}, {false, true, false}} {
		if _, err := good.Delete(t.Context(), "/penstock/", clientv3.WithPrefix()); err != nil {
			t.Fatal(err)
		}
		id := NewID()
		done, deaf, wrote = c.done, c.deaf, false
		err := Found(t.Context(), cli, Config{}, id, peer.Sealed{})
		if !wrote || (err == nil) != c.made || err != nil && !errors.Is(err, meta.Unavailable) {
			t.Errorf("%+v: %v", c, err)
		}
		deaf = false
		if err := Found(t.Context(), cli, Config{}, id, peer.Sealed{}); err != nil {
			t.Errorf("%+v, again: %v", c, err)
		}
		want(t, Found(t.Context(), cli, Config{}, NewID(), peer.Sealed{}), meta.Exists)
		want(t, Vacant(t.Context(), cli, Config{}), meta.Exists)
	}
	// Half of a cluster is no place for another.
	if _, err := good.Delete(t.Context(), "/penstock/default/format"); err != nil {
		t.Fatal(err)
	}
	want(t, Found(t.Context(), cli, Config{}, NewID(), peer.Sealed{}), meta.Exists)
}
