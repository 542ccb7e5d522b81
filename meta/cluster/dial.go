package cluster

import (
	"context"
	"crypto/tls"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/meta"
)

// Dial makes a client of an etcd cluster: endpoints are "https://host:port",
// "http://host:port" or "unix:///path"; tlsConfig is nil without TLS. It does
// not wait for a connection. The client's own log is silent: its errors reach
// the callers. Errors: Invalid.
func Dial(endpoints []string, tlsConfig *tls.Config) (*clientv3.Client, error) {
	cli, err := clientv3.New(clientv3.Config{
		Endpoints: endpoints,
		TLS:       tlsConfig,
		// A connection that is dead without a word is noticed in eight seconds;
		// etcd by default throws out who asks more often than every five.
		DialKeepAliveTime:    6 * time.Second,
		DialKeepAliveTimeout: 2 * time.Second,
		Logger:               zap.NewNop(),
		DialOptions:          []grpc.DialOption{grpc.WithChainUnaryInterceptor(again)},
	})
	if err != nil {
		return nil, meta.E("reach etcd", meta.Invalid, "", err)
	}
	return cli, nil
}

// How long a read waits for a member before it asks another: first, and at most.
const (
	readPatience    = 300 * time.Millisecond
	maxReadPatience = 8 * time.Second
)

// writePatience bounds a write: what became of one that got no answer is not
// known, and its caller finds out.
const writePatience = 3 * time.Second

// again asks once more, and so another member, when a read gets no answer: a
// member that stands still keeps its connections. Writes are left to their
// callers, who know what a second one would mean.
func again(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	switch {
	case writes(req):
		ctx, cancel := context.WithTimeout(ctx, writePatience)
		defer cancel()
		return invoke(ctx, method, req, reply, cc, opts...)
	case !reads(req):
		return invoke(ctx, method, req, reply, cc, opts...)
	}
	for n := 0; ; n++ {
		// Members are asked in turn, three as a rule: each of them a little while
		// before anyone is asked for longer.
		try, cancel := context.WithTimeout(ctx, min(readPatience<<min(n/3, 8), maxReadPatience))
		err := invoke(try, method, req, reply, cc, opts...)
		cancel()
		if err == nil || ctx.Err() != nil || status.Code(err) != codes.DeadlineExceeded {
			return err
		}
	}
}

// writes reports whether a request changes keys or leases.
func writes(req any) bool {
	switch req.(type) {
	case *etcdserverpb.PutRequest, *etcdserverpb.DeleteRangeRequest, *etcdserverpb.LeaseRevokeRequest:
		return true
	case *etcdserverpb.TxnRequest:
		return !reads(req)
	}
	return false
}

// reads reports whether a request may be made twice.
func reads(req any) bool {
	switch r := req.(type) {
	case *etcdserverpb.RangeRequest, *etcdserverpb.MemberListRequest:
		return true
	case *etcdserverpb.LeaseGrantRequest: // one that nobody knows of ends by itself
		return true
	case *etcdserverpb.TxnRequest:
		for _, ops := range [][]*etcdserverpb.RequestOp{r.Success, r.Failure} {
			for _, op := range ops {
				if op.GetRequestRange() == nil {
					return false
				}
			}
		}
		return true
	}
	return false
}
