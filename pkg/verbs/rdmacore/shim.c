//go:build rdmacore && cgo && linux

// This file must not link against the RDMA libraries, because they are opened at run time. The
// inline functions of verbs.h use the context's table of operations and need no symbol. All other
// functions are called through lib.
#define _GNU_SOURCE // dup3
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <netinet/in.h>
#include <unistd.h>

#include "shim.h"

// verbs.h defines these as macros that call other functions.
#undef ibv_reg_mr
#undef ibv_query_port

#define VERBS_SYMBOLS(X) \
	X(ibv_get_device_name) X(ibv_query_device) X(ibv_query_port) \
	X(ibv_alloc_pd) X(ibv_dealloc_pd) X(ibv_reg_mr) X(ibv_dereg_mr) \
	X(ibv_create_comp_channel) X(ibv_destroy_comp_channel) X(ibv_create_cq) X(ibv_destroy_cq) \
	X(ibv_get_cq_event) X(ibv_ack_cq_events) X(ibv_modify_qp) X(ibv_get_async_event) X(ibv_ack_async_event)

#define CM_SYMBOLS(X) \
	X(rdma_create_event_channel) X(rdma_destroy_event_channel) X(rdma_get_cm_event) X(rdma_ack_cm_event) \
	X(rdma_create_id) X(rdma_destroy_id) X(rdma_bind_addr) X(rdma_resolve_addr) X(rdma_resolve_route) \
	X(rdma_create_qp) X(rdma_destroy_qp) X(rdma_connect) X(rdma_listen) X(rdma_accept) X(rdma_reject) \
	X(rdma_disconnect) X(rdma_notify) X(rdma_get_devices) X(rdma_free_devices) X(rdma_set_option)

#define DECLARE(name) __typeof__(&name) name;
static struct {
	VERBS_SYMBOLS(DECLARE)
	CM_SYMBOLS(DECLARE)
} lib;

static void *open_library(const char *name, char *reason, int size)
{
	void *h = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
	if (!h)
		snprintf(reason, size, "%s", dlerror());
	return h;
}

int rc_load(char *reason, int size)
{
	void *verbs = open_library("libibverbs.so.1", reason, size);
	if (!verbs)
		return -ENOENT;
	void *cm = open_library("librdmacm.so.1", reason, size);
	if (!cm)
		return -ENOENT;
#define FIND_IN(handle, name) \
	if (!(lib.name = (__typeof__(lib.name))dlsym(handle, #name))) { \
		snprintf(reason, size, "%s", dlerror()); \
		return -ENOSYS; \
	}
#define FIND_VERBS(name) FIND_IN(verbs, name)
#define FIND_CM(name) FIND_IN(cm, name)
	VERBS_SYMBOLS(FIND_VERBS)
	CM_SYMBOLS(FIND_CM)
	return 0;
}

// errno_result returns 0, or the negative errno of a function that returned -1 and set errno.
static int errno_result(int ret)
{
	if (ret == 0)
		return 0;
	return errno > 0 ? -errno : -EIO;
}

// verb_result returns 0, or the negative errno of a verb. Most verbs return errno as a positive
// number, and some providers as a negative one.
static int verb_result(int ret)
{
	if (ret == -1)
		return errno_result(ret);
	return ret > 0 ? -ret : ret;
}

// null_result returns the negative errno of a function that returned NULL.
static int null_result(void)
{
	return errno > 0 ? -errno : errno < 0 ? errno : -EIO; // some providers set a negative errno
}

int rc_open_channel(struct rdma_event_channel **out)
{
	errno = 0;
	*out = lib.rdma_create_event_channel();
	return *out ? 0 : null_result();
}

void rc_close_channel(struct rdma_event_channel *ch)
{
	lib.rdma_destroy_event_channel(ch);
}

int rc_next_event(struct rdma_event_channel *ch, struct rc_event *out)
{
	struct rdma_cm_event *ev;
	if (lib.rdma_get_cm_event(ch, &ev))
		return errno_result(-1);
	memset(out, 0, sizeof *out);
	out->event = ev;
	out->id = ev->id;
	out->listener = ev->listen_id;
	out->kind = ev->event;
	out->status = ev->status;
	switch (ev->event) {
	case RDMA_CM_EVENT_CONNECT_REQUEST:
	case RDMA_CM_EVENT_ESTABLISHED:
	case RDMA_CM_EVENT_REJECTED:
		out->responder_resources = ev->param.conn.responder_resources;
		out->initiator_depth = ev->param.conn.initiator_depth;
		if (ev->param.conn.private_data) {
			out->private_len = ev->param.conn.private_data_len;
			memcpy(out->private_data, ev->param.conn.private_data, out->private_len);
		}
		break;
	default:
		break;
	}
	return 0;
}

void rc_ack_event(struct rc_event *ev)
{
	lib.rdma_ack_cm_event(ev->event);
}

int rc_create_id(struct rdma_event_channel *ch, struct rdma_cm_id **out)
{
	return errno_result(lib.rdma_create_id(ch, out, NULL, RDMA_PS_TCP));
}

int rc_destroy_id(struct rdma_cm_id *id)
{
	return errno_result(lib.rdma_destroy_id(id));
}

int rc_resolve_addr(struct rdma_cm_id *id, void *addr, int timeout)
{
	return errno_result(lib.rdma_resolve_addr(id, NULL, addr, timeout));
}

int rc_resolve_route(struct rdma_cm_id *id, int timeout)
{
	return errno_result(lib.rdma_resolve_route(id, timeout));
}

int rc_listen(struct rdma_cm_id *id, void *addr, int backlog)
{
	int only = 1; // an IPv6 listener must not listen on IPv4
	if (((struct sockaddr *)addr)->sa_family == AF_INET6)
		lib.rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &only, sizeof only);
	if (lib.rdma_bind_addr(id, addr))
		return errno_result(-1);
	return errno_result(lib.rdma_listen(id, backlog));
}

// Credits guarantee that a Receive is posted for each Send. The retries are for a peer that posts
// its first Receives late. 7 would mean unlimited retries.
#define RETRIES 6

static struct rdma_conn_param conn_param(const void *data, int len, int responder_resources, int initiator_depth)
{
	struct rdma_conn_param p = {
		.private_data = len ? data : NULL,
		.private_data_len = len,
		.responder_resources = responder_resources,
		.initiator_depth = initiator_depth,
		.retry_count = RETRIES,
		.rnr_retry_count = RETRIES,
	};
	return p;
}

int rc_connect(struct rdma_cm_id *id, const void *data, int len, int responder_resources, int initiator_depth)
{
	struct rdma_conn_param p = conn_param(data, len, responder_resources, initiator_depth);
	sigset_t all, before;
	int ret;

	// The Go runtime sends signals to its threads. A signal makes siw close the TCP connection that it
	// is making, and start again. A connection that is closed at once disables the listener of a siw
	// server.
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	ret = errno_result(lib.rdma_connect(id, &p));
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return ret;
}

int rc_accept(struct rdma_cm_id *id, const void *data, int len, int responder_resources, int initiator_depth)
{
	struct rdma_conn_param p = conn_param(data, len, responder_resources, initiator_depth);
	return errno_result(lib.rdma_accept(id, &p));
}

int rc_reject(struct rdma_cm_id *id, const void *data, int len)
{
	return errno_result(lib.rdma_reject(id, len ? data : NULL, len));
}

int rc_disconnect(struct rdma_cm_id *id)
{
	return errno_result(lib.rdma_disconnect(id));
}

int rc_comm_established(struct rdma_cm_id *id)
{
	return errno_result(lib.rdma_notify(id, IBV_EVENT_COMM_EST));
}

void rc_address(struct rdma_cm_id *id, int peer, void *out)
{
	struct sockaddr *a = peer ? rdma_get_peer_addr(id) : rdma_get_local_addr(id);
	memcpy(out, a, a->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in));
}

struct ibv_context **rc_devices(int *n)
{
	return lib.rdma_get_devices(n);
}

struct ibv_context **rc_hold_context(struct ibv_context *ctx)
{
	struct ibv_context **hold = calloc(2, sizeof *hold);
	if (!hold)
		abort(); // no memory for two pointers
	hold[0] = ctx;
	return hold;
}

void rc_release_hold(struct ibv_context **hold)
{
	lib.rdma_free_devices(hold);
}

const char *rc_device_path(struct ibv_context *ctx)
{
	return ctx->device->dev_path;
}

// rc_detach_context replaces the descriptors of a context with this file.
static const char substitute[] = "/dev/null";

int rc_detach_context(struct ibv_context *ctx)
{
	int fd = open(substitute, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return errno_result(-1);
	int ret = 0;
	if (dup3(fd, ctx->cmd_fd, O_CLOEXEC) < 0 || dup3(fd, ctx->async_fd, O_CLOEXEC) < 0)
		ret = errno_result(-1);
	close(fd);
	return ret;
}

int rc_is_detached(struct ibv_context *ctx)
{
	struct stat null, now;
	return !stat(substitute, &null) && !fstat(ctx->cmd_fd, &now) && S_ISCHR(now.st_mode) && now.st_rdev == null.st_rdev;
}

int rc_port_state(struct ibv_context *ctx, int port)
{
	struct ibv_port_attr attr; // at least as large as _compat_ibv_port_attr
	memset(&attr, 0, sizeof attr);
	int ret = verb_result(lib.ibv_query_port(ctx, port, (struct _compat_ibv_port_attr *)&attr));
	return ret ? ret : (int)attr.state;
}

int rc_port(struct rdma_cm_id *id)
{
	return id->port_num;
}

const char *rc_device_name(struct ibv_context *ctx)
{
	return lib.ibv_get_device_name(ctx->device);
}

int rc_is_iwarp(struct ibv_context *ctx)
{
	return ctx->device->transport_type == IBV_TRANSPORT_IWARP;
}

int rc_query_device(struct ibv_context *ctx, struct ibv_device_attr *out)
{
	return verb_result(lib.ibv_query_device(ctx, out));
}

int rc_try_window(struct ibv_context *ctx)
{
	struct ibv_pd *pd;
	struct ibv_mw *mw = NULL;
	int ret = rc_alloc_pd(ctx, &pd);
	if (ret)
		return ret;
	ret = rc_alloc_mw(pd, &mw);
	if (!ret)
		rc_dealloc_mw(mw);
	rc_dealloc_pd(pd);
	return ret;
}

int rc_next_async(struct ibv_context *ctx, struct rc_async *out)
{
	memset(out, 0, sizeof *out);
	errno = 0;
	if (lib.ibv_get_async_event(ctx, &out->event))
		return errno_result(-1);
	out->kind = out->event.event_type;
	switch (out->kind) {
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
		out->qp = out->event.element.qp;
		break;
	case IBV_EVENT_PORT_ACTIVE:
	case IBV_EVENT_PORT_ERR:
		out->port = out->event.element.port_num;
		break;
	default:
		break;
	}
	return 0;
}

void rc_ack_async(struct rc_async *ev)
{
	lib.ibv_ack_async_event(&ev->event);
}

int rc_alloc_pd(struct ibv_context *ctx, struct ibv_pd **out)
{
	errno = 0;
	*out = lib.ibv_alloc_pd(ctx);
	return *out ? 0 : null_result();
}

int rc_dealloc_pd(struct ibv_pd *pd)
{
	return verb_result(lib.ibv_dealloc_pd(pd));
}

int rc_reg_mr(struct ibv_pd *pd, void *addr, uint64_t len, int access, struct ibv_mr **out)
{
	errno = 0;
	*out = lib.ibv_reg_mr(pd, addr, len, access);
	return *out ? 0 : null_result();
}

int rc_dereg_mr(struct ibv_mr *mr)
{
	return verb_result(lib.ibv_dereg_mr(mr));
}

int rc_alloc_mw(struct ibv_pd *pd, struct ibv_mw **out)
{
	errno = 0;
	*out = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	return *out ? 0 : null_result();
}

int rc_dealloc_mw(struct ibv_mw *mw)
{
	return verb_result(ibv_dealloc_mw(mw));
}

int rc_create_cq(struct ibv_context *ctx, int depth, struct ibv_comp_channel **ch, struct ibv_cq **out)
{
	errno = 0;
	*ch = lib.ibv_create_comp_channel(ctx);
	if (!*ch)
		return null_result();
	*out = lib.ibv_create_cq(ctx, depth, NULL, *ch, 0);
	if (!*out) {
		int ret = null_result();
		lib.ibv_destroy_comp_channel(*ch);
		return ret;
	}
	return 0;
}

int rc_create_cq_without_channel(struct ibv_context *ctx, int depth, struct ibv_cq **out)
{
	errno = 0;
	*out = lib.ibv_create_cq(ctx, depth, NULL, NULL, 0);
	return *out ? 0 : null_result();
}

int rc_destroy_cq_without_channel(struct ibv_cq *cq)
{
	return verb_result(lib.ibv_destroy_cq(cq));
}

int rc_destroy_cq(struct ibv_cq *cq, struct ibv_comp_channel *ch)
{
	int ret = verb_result(lib.ibv_destroy_cq(cq));
	if (!ret)
		ret = verb_result(lib.ibv_destroy_comp_channel(ch));
	return ret;
}

int rc_arm_cq(struct ibv_cq *cq)
{
	return verb_result(ibv_req_notify_cq(cq, 0));
}

int rc_take_cq_event(struct ibv_comp_channel *ch)
{
	struct ibv_cq *cq;
	void *context;
	if (lib.ibv_get_cq_event(ch, &cq, &context))
		return errno_result(-1);
	lib.ibv_ack_cq_events(cq, 1);
	return 0;
}

int rc_poll_cq(struct ibv_cq *cq, struct rc_wc *out)
{
	struct ibv_wc wc[RC_POLL_BATCH];
	int n = ibv_poll_cq(cq, RC_POLL_BATCH, wc);
	for (int i = 0; i < n; i++) {
		out[i].wr_id = wc[i].wr_id;
		out[i].status = wc[i].status;
		out[i].vendor_err = wc[i].vendor_err;
		out[i].byte_len = wc[i].byte_len;
		out[i].flags = wc[i].wc_flags;
		out[i].invalidated_rkey = wc[i].invalidated_rkey;
	}
	return n == -1 ? -EIO : n;
}

int rc_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_cq *send, struct ibv_cq *recv,
                 int max_send_wr, int max_recv_wr, int max_send_sge, struct ibv_qp **out)
{
	struct ibv_qp_init_attr attr = {
		.send_cq = send,
		.recv_cq = recv,
		.cap = {
			.max_send_wr = max_send_wr,
			.max_recv_wr = max_recv_wr,
			.max_send_sge = max_send_sge,
			.max_recv_sge = 1,
		},
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 0,
	};
	if (lib.rdma_create_qp(id, pd, &attr))
		return errno_result(-1);
	*out = id->qp;
	return 0;
}

void rc_destroy_qp(struct rdma_cm_id *id)
{
	lib.rdma_destroy_qp(id);
}

int rc_fail_qp(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	return verb_result(lib.ibv_modify_qp(qp, &attr, IBV_QP_STATE));
}

int rc_post_send(struct ibv_qp *qp, const struct rc_wr *wrs, int n, struct ibv_sge *sges,
                 struct ibv_send_wr *scratch, int *posted)
{
	struct ibv_send_wr *bad = NULL;
	for (int i = 0; i < n; i++) {
		const struct rc_wr *from = &wrs[i];
		struct ibv_send_wr *to = &scratch[i];
		memset(to, 0, sizeof *to);
		to->wr_id = from->wr_id;
		to->next = i + 1 < n ? to + 1 : NULL;
		to->sg_list = from->num_sge ? &sges[from->first_sge] : NULL;
		to->num_sge = from->num_sge;
		to->opcode = from->opcode;
		to->send_flags = from->flags;
		switch (from->opcode) {
		case IBV_WR_BIND_MW:
			to->bind_mw.mw = from->mw;
			to->bind_mw.rkey = from->rkey;
			to->bind_mw.bind_info.mr = from->mr;
			to->bind_mw.bind_info.addr = from->bind_addr;
			to->bind_mw.bind_info.length = from->bind_len;
			to->bind_mw.bind_info.mw_access_flags = from->bind_access;
			break;
		case IBV_WR_LOCAL_INV:
			to->invalidate_rkey = from->invalidate;
			break;
		case IBV_WR_SEND_WITH_INV:
			to->invalidate_rkey = from->invalidate;
			to->wr.rdma.rkey = from->invalidate; // libsiw reads the key here
			break;
		default:
			to->wr.rdma.remote_addr = from->remote_addr;
			to->wr.rdma.rkey = from->rkey;
		}
	}
	int ret = verb_result(ibv_post_send(qp, scratch, &bad));
	*posted = !ret ? n : bad >= scratch && bad < scratch + n ? (int)(bad - scratch) : 0;
	// Most providers expect the caller to update the window's key, and compare the key at the next
	// bind.
	for (int i = 0; i < *posted; i++)
		if (wrs[i].opcode == IBV_WR_BIND_MW)
			wrs[i].mw->rkey = wrs[i].rkey;
	return ret;
}

int rc_post_recv(struct ibv_qp *qp, uint64_t wr_id, void *addr, uint32_t len, uint32_t lkey)
{
	struct ibv_sge sge = { .addr = (uintptr_t)addr, .length = len, .lkey = lkey };
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = len ? 1 : 0 }, *bad;
	return verb_result(ibv_post_recv(qp, &wr, &bad));
}

int rc_post_marker(struct ibv_qp *qp, uint64_t wr_id)
{
	struct ibv_send_wr wr = { .wr_id = wr_id, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED }, *bad;
	return verb_result(ibv_post_send(qp, &wr, &bad));
}
