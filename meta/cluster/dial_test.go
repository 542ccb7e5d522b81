package cluster

import (
	"context"
	"testing"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestBrokenConnections: a read is sent again over a connection that broke, a bounded number of
// times; a write is not.
func TestBrokenConnections(t *testing.T) {
	t.Parallel()
	get := &etcdserverpb.RequestOp{Request: &etcdserverpb.RequestOp_RequestRange{RequestRange: &etcdserverpb.RangeRequest{}}}
	put := &etcdserverpb.RequestOp{Request: &etcdserverpb.RequestOp_RequestPut{}}
	for _, c := range []struct {
		name   string
		req    any
		breaks int // calls that end with a broken connection
		calls  int
		fails  bool
	}{
		{"a read", &etcdserverpb.RangeRequest{}, 1, 2, false},
		{"a transaction that reads", &etcdserverpb.TxnRequest{Success: []*etcdserverpb.RequestOp{get}}, brokenTries, brokenTries + 1, false},
		{"a read that no member answers", &etcdserverpb.RangeRequest{}, 1000, brokenTries + 1, true},
		{"a write", &etcdserverpb.PutRequest{}, 1, 1, true},
		{"a transaction that writes", &etcdserverpb.TxnRequest{Success: []*etcdserverpb.RequestOp{get, put}}, 1, 1, true},
	} {
		calls := 0
		err := again(t.Context(), "", c.req, nil, nil, func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
			if calls++; calls <= c.breaks {
				return status.Error(codes.Unavailable, "connection reset by peer")
			}
			return nil
		})
		if calls != c.calls || (err != nil) != c.fails {
			t.Errorf("%s: %d calls, error %v; want %d calls, an error: %v", c.name, calls, err, c.calls, c.fails)
		}
	}
}
